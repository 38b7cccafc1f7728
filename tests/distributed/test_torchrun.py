"""Jobs under the real torchrun: a dead rank is named, nothing keeps running, a lost node is recovered."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import digests, events
from tests.own_scripts import BASE_FLAGS, OWN_SCRIPT, run_own
from tests.ports import free_port
from tests.processes import is_running, wait_until_group_is_gone
from tests.references import References
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent.parent


def start_torchrun(words: Sequence[str], output: Path, **env: str) -> subprocess.Popen[bytes]:
    """Start torchrun with words of a command line in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    with output.open("w") as file:
        return subprocess.Popen(
            [*command, *words],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


@pytest.mark.rest
def test_torchrun_ends_soon_after_a_kill_and_the_survivors_name_the_dead_rank(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    flags = [*model_flags(), *layout_flags({"ep": 2}), *dataset_flags, *event_flags(tmp_path)]
    flags += ["--moe-ft-inject-fault", "kill:1@2:backward"]
    options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    output = tmp_path / "output.log"
    process = start_torchrun([*options, "pretrain_gpt_moe.py", *flags], output)
    assert process.wait(timeout=120) != 0
    text = output.read_text()
    assert "heard nothing from rank 1 (last in iteration 2, backward), which probably died" in text
    assert events(tmp_path, 0)[-1]["event"] == "stopped"
    wait_until_group_is_gone(process.pid)


def command_of_two_nodes(port: int, flags: Sequence[str]) -> list[str]:
    """Return words after torchrun's name that run the own script with one rank on each of two nodes."""
    options = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-id", "two_agents", "--local-addr", "127.0.0.1"),
    ]
    script = ["-m", "moe_ft", "keep", "--", "-m", "moe_ft", "run", str(OWN_SCRIPT), *BASE_FLAGS]
    return [*options, *script, *flags]


def start_node(command: Sequence[str], folder: Path, node: str) -> subprocess.Popen[bytes]:
    """Start the agent of a node."""
    return start_torchrun(
        command,
        folder / f"{node}.log",
        MOE_FT_NODE_ID=node,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )


def is_listening(port: int) -> bool:
    """Return whether a process of this machine accepts connections at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def kill_node(node: str) -> None:
    """Kill all processes of a node."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"MOE_FT_NODE_ID={node}".encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def test_lost_node_of_two_torchrun_agents_that_run_a_script_is_recovered_from_its_peer(
    tmp_path: Path, memory_dir: Path, references: References
) -> None:
    job = [*model_flags(train_iters=6, hidden_dropout=0.1), *layout_flags({"ep": 2})]
    flags = [
        *(*job, *event_flags(tmp_path), "--moe-ft-strategy", "dense"),
        *("--moe-ft-memory-dir", str(memory_dir)),
        *("--moe-ft-inject-fault", "lose-node:1@4:backward"),
    ]
    command = command_of_two_nodes(free_port(), flags)
    agents = [start_node(command, tmp_path, node) for node in ("node0", "node1")]
    try:
        codes = [agent.wait(timeout=240) for agent in agents]
    finally:
        for agent in agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
    assert codes == [0, 0], (tmp_path / "node0.log").read_text()[-3000:]
    # The ranks of both starts were forked from one process a node, which ends with the agent.
    logs = [(tmp_path / f"{node}.log").read_text() for node in ("node0", "node1")]
    zygotes = [int(re.findall(r"ranks are forked from process (\d+)", each)[0]) for each in logs]
    assert [each.count("ranks are forked from process") for each in logs] == [1, 1]
    wait_for(lambda: not any(map(is_running, zygotes)), "the end of the zygotes")
    # Each process that ended, ended well: nothing was started a third time.
    assert [len(events(tmp_path, rank, "start")) for rank in range(2)] == [2, 2]
    assert [len(events(tmp_path, rank, "end")) for rank in range(2)] == [1, 1]
    one, other = (events(tmp_path, rank, "recovery")[-1] for rank in range(2))
    # The agents may have swapped their ranks since.
    assert sorted([*one["sources"], *other["sources"]]) == ["memory", "peer"]
    assert one["restored_iteration"] == other["restored_iteration"] in range(1, 5)
    assert digests(tmp_path, 2) == references.digests(job, 2, run_own)


@pytest.mark.rest
def test_spare_node_takes_the_place_of_one_that_is_lost_with_its_agent(
    tmp_path: Path, memory_dir: Path, references: References
) -> None:
    job = [*model_flags(train_iters=40, hidden_dropout=0.1), *layout_flags({"ep": 2})]
    flags = [*event_flags(tmp_path), "--moe-ft-strategy", "dense"]
    flags += ["--moe-ft-memory-dir", str(memory_dir)]
    port = free_port()
    command = command_of_two_nodes(port, [*job, *flags])
    logs = {node: tmp_path / f"{node}.log" for node in ("node0", "node1", "node2")}

    def has_trained(node: str) -> bool:
        return re.search(r"iteration +5/", logs[node].read_text()) is not None

    # The first agent keeps the rendezvous; the last one waits in it until there is a place.
    agents = {"node0": start_node(command, tmp_path, "node0")}
    try:
        wait_for(lambda: is_listening(port), "the first agent")
        agents["node1"] = start_node(command, tmp_path, "node1")
        wait_for(lambda: has_trained("node0") or has_trained("node1"), "training", 120)
        agents["node2"] = start_node(command, tmp_path, "node2")
        kill_node("node1")
        codes = {node: agent.wait(timeout=240) for node, agent in agents.items()}
    finally:
        for agent in agents.values():
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
    assert codes == {"node0": 0, "node1": -signal.SIGKILL, "node2": 0}
    found = [events(tmp_path, rank, "recovery")[-1] for rank in range(2)]
    assert sorted(source for each in found for source in each["sources"]) == ["memory", "peer"]
    assert found[0]["restored_iteration"] == found[1]["restored_iteration"] >= 3
    assert digests(tmp_path, 2) == references.digests(job, 2, run_own)
