"""Real processes: nothing keeps running, a lost node is recovered."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ft.commands.plan import compare
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import digests, events
from tests.nodes import Nodes
from tests.own_scripts import BASE_FLAGS, OWN_SCRIPT, run_own
from tests.ports import free_port
from tests.processes import is_running, wait_until_group_is_gone
from tests.references import References
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.rest
def test_ranks_of_one_node_restart_although_torchrun_shares_its_store(
    tmp_path: Path, memory_dir: Path, references: References
) -> None:
    job = [*model_flags(train_iters=6, hidden_dropout=0.1), *layout_flags({"ep": 2})]
    flags = [
        *(*job, *event_flags(tmp_path), "--moe-ft-strategy", "dense"),
        *("--moe-ft-memory-dir", str(memory_dir)),
        *("--moe-ft-inject-fault", "kill:0@4:backward"),
    ]
    words = ["-m", "moe_ft", "run", str(OWN_SCRIPT), *BASE_FLAGS, *flags]
    shares = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    with Nodes(tmp_path, words, num_nodes=1, num_ranks=2, max_restarts=2, env=shares) as nodes:
        nodes.start("node0")
        assert nodes.wait() == [0], nodes.log("node0")[-3000:]
    assert [len(events(tmp_path, rank, "start")) for rank in range(2)] == [2, 2]
    assert [len(events(tmp_path, rank, "recovery")) for rank in range(2)] == [1, 1]
    assert digests(tmp_path, 2) == references.digests(job, 2, run_own)


def test_lost_node_of_two_torchrun_agents_that_run_a_script_is_recovered_from_its_peer(
    tmp_path: Path, memory_dir: Path, references: References
) -> None:
    changes = {"train_iters": 6, "hidden_dropout": 0.1, "num_workers": 2}
    job = [*model_flags(**changes), *layout_flags({"ep": 2})]
    flags = [
        *(*job, *event_flags(tmp_path), "--moe-ft-strategy", "dense"),
        *("--moe-ft-memory-dir", str(memory_dir)),
        *("--moe-ft-inject-fault", "lose-node:1@4:backward"),
    ]
    words = ["-m", "moe_ft", "run", str(OWN_SCRIPT), *BASE_FLAGS, *flags]
    with Nodes(tmp_path, words, num_nodes=2, num_ranks=2, max_restarts=2, keeps=True) as nodes:
        nodes.start("node0", "node1")
        assert nodes.wait() == [0, 0], nodes.log("node0")[-3000:]
    # The ranks of both starts were forked from one process a node, which ends with the agent.
    logs = [nodes.log(node) for node in ("node0", "node1")]
    servers = [int(re.findall(r"ranks are forked from process (\d+)", each)[0]) for each in logs]
    assert [each.count("ranks are forked from process") for each in logs] == [1, 1]
    wait_for(lambda: not any(map(is_running, servers)), "the end of the fork servers")
    # Each process that ended, ended well: nothing was started a third time.
    assert [len(events(tmp_path, rank, "start")) for rank in range(2)] == [2, 2]
    assert [len(events(tmp_path, rank, "end")) for rank in range(2)] == [1, 1]
    one, other = (events(tmp_path, rank, "recovery")[-1] for rank in range(2))
    # The agents may have swapped their ranks since.
    assert sorted([*one["sources"], *other["sources"]]) == ["memory", "peer"]
    assert one["restored_iteration"] == other["restored_iteration"] in range(1, 5)
    assert digests(tmp_path, 2) == references.digests(job, 2, run_own)
    # Each line has the loss of its iteration, also the one after the first of a start.
    losses = {
        each["iteration"]: f"{each['loss']:.6E}"
        for rank in range(2)
        for each in events(tmp_path, rank, "iteration")
    }
    logged = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", "".join(logs))
    assert {int(number) for number, _ in logged} == set(range(1, 7))
    assert [loss for _, loss in logged] == [losses[int(number)] for number, _ in logged]


def test_command_that_plan_prints_starts_as_it_stands_and_replaces_a_dead_rank(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path
) -> None:
    job = [*model_flags(train_iters=6), *layout_flags({"ep": 2}), *dataset_flags]
    job += [*event_flags(tmp_path), "--moe-ft-memory-dir", str(memory_dir)]
    job += ["--moe-ft-inject-fault", "kill:1@4:backward"]
    launch = ["torchrun", "--nproc-per-node", "2", "--rdzv-endpoint", f"localhost:{free_port()}"]
    told = compare(
        ["--iteration-s=1", "--bandwidth=1GB", "--mtbf-s=600", "--restart-s=60", "--repair-s=2"]
        + ["--", *launch, "pretrain_gpt_moe.py", *job]
    )
    assert not told.begin.placeholders
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "output.log").open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", told.begin.text],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        assert process.wait(timeout=300) == 0, (tmp_path / "output.log").read_text()[-3000:]
    wait_until_group_is_gone(process.pid)
    assert [len(events(tmp_path, rank, "end")) for rank in range(2)] == [1, 1]
    assert [len(events(tmp_path, rank, "repair")) for rank in range(2)] == [1, 1]


@pytest.mark.rest
def test_checkpoint_writers_of_a_killed_rank_end_with_it(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    flags = [*model_flags(train_iters=4), *dataset_flags, *event_flags(tmp_path / "events")]
    flags += ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    flags += ["--moe-ft-inject-fault", "kill:0@2"]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (tmp_path / "output.log").open("w") as output:
        # A real process with a real main module: the spawned writers import it.
        process = subprocess.Popen(
            [sys.executable, "pretrain_gpt_moe.py", *flags],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        assert process.wait(timeout=180) == -signal.SIGKILL, (tmp_path / "output.log").read_text()
    wait_until_group_is_gone(process.pid)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"
