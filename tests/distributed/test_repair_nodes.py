"""Repairs under torchrun: what cannot be repaired is restarted, and after that a death is repaired again.

Each agent counts restarts for itself, and a node that comes later has counted none. The last test has a
stranger who can connect to the job's store.
"""

import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.jobs import RepairedJob
from tests.kept_job import ROOT
from tests.nodes import Nodes
from tests.waiting import wait_for

TWO_RANKS: Mapping[str, Any] = {"num_ranks": 2, "layout": {"ep": 2}}
TWO_NODES: Mapping[str, Any] = {**TWO_RANKS, "num_nodes": 2, "max_restarts": 3}
LONG = {"train_iters": 60}
DYING = ROOT / "tests" / "distributed" / "scripts" / "pretrain_dying_between.py"


def check(job: RepairedJob, *, num_starts: int, repairs: Sequence[int] = (1,)) -> None:
    """Check that ranks were started so often, so many deaths were repaired, and the bits are the same."""
    for rank in range(job.num_ranks):
        assert len(job.events("repair", rank)) in repairs
        assert len(job.events("start", rank)) >= num_starts + 1
        assert [line["reason"] for line in job.events("end", rank)] == ["finished"]
    assert job.digests() == job.reference()


@pytest.mark.rest
def test_exception_in_the_first_iteration_restarts_two_nodes_and_a_death_after_it_is_repaired(
    repaired: RepairedJob,
) -> None:
    repaired.run_under_torchrun("exception:1@0:backward", "kill:0@5:backward", **TWO_NODES)
    check(repaired, num_starts=2)


@pytest.mark.rest
def test_death_before_an_exit_restarts_two_nodes_and_a_death_after_it_is_repaired(
    repaired: RepairedJob,
) -> None:
    env = {
        "DYING": "kill:1@3",
        "DYING_IN": "exit",
        "DYING_MARKER": str(repaired.folder / "has_died"),
    }
    changes = {"exit_duration_in_mins": 1000}  # ranks ask each other in each iteration
    repaired.run_under_torchrun(
        "kill:0@6:backward", script=str(DYING), env=env, changes=changes, **TWO_NODES
    )
    check(repaired, num_starts=2)
    assert "a rank has died between two iterations" in (repaired.folder / "log").read_text()


@pytest.mark.rest
def test_three_broken_rounds_restart_two_nodes_and_a_death_after_them_is_repaired(
    repaired: RepairedJob,
) -> None:
    faults = (
        *("kill:3@4:forward", "kill:0@3:recovery", "kill:1@4:backward", "kill:2@4:after-step"),
        "kill:3@6:backward",
    )
    repaired.run_under_torchrun(*faults, num_nodes=2, max_restarts=1)
    text = (repaired.folder / "log").read_text()
    assert "3 rounds of repairs were broken before an iteration was finished" in text
    check(repaired, num_starts=2)


def wait_until_trained(nodes: Nodes, *names: str) -> None:
    """Wait for the fifth log line on one of the nodes."""
    wait_for(
        lambda: any(re.search(r"iteration +5/", nodes.log(name)) for name in names), "training"
    )


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("other", ["node1", "node2"], ids=["the same node", "a spare node"])
def test_node_that_is_lost_with_its_agent_is_replaced_and_a_death_after_it_is_repaired(
    repaired: RepairedJob, memory_dir: Path, other: str
) -> None:
    with repaired.nodes("kill:0@50:backward", changes=LONG, **TWO_NODES) as nodes:
        nodes.start("node0", "node1")
        wait_until_trained(nodes, "node0", "node1")
        if other == "node2":
            nodes.start(other)  # waits in the rendezvous
        nodes.kill("node1")
        for path in memory_dir.glob("*/node1"):
            shutil.rmtree(path)
        if other == "node1":
            nodes.start(other)
        assert nodes.wait() == [0, -9, 0], nodes.log("node0")[-3000:]
    # The other node runs the lost rank, too, until torchrun has all ranks start again on two nodes.
    check(repaired, num_starts=2, repairs=(1, 2))


class _Payload:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


def plant(port: int, path: Path) -> None:
    """Write, as a stranger would, what would run code in a replacement, and what would stop the job."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    keys: Sequence[str] = [
        f"round_1/{what}" for what in ("members", "ready", "all_members", "timed_out")
    ]
    keys = [*keys, "round_1/declared", "round_1/finished", "round_1/all_ready"]
    for prefix in ("moe_ft", "moe_ft/start_0"):
        ours = dist.PrefixStore(prefix, store)
        payload = pickle.dumps([_Payload(path)] * 2)
        ours.set("gathered_0", payload)  # type: ignore[arg-type]  # takes bytes too
        for key in keys:
            ours.set(key, "1")
            ours.add(f"{key}/count", 100)


@pytest.mark.rest
@pytest.mark.parametrize("dies", [True, False], ids=["with a death", "without one"])
def test_stranger_in_the_store_runs_no_code_and_does_not_end_the_job(
    repaired: RepairedJob, dies: bool
) -> None:
    faults = ["kill:1@100:backward"] * dies
    mark = repaired.folder / "the_code_has_run"
    options = {"changes": {"train_iters": 120}, "max_restarts": int(dies), **TWO_RANKS}
    with repaired.nodes(*faults, **options) as nodes:
        nodes.start("node0")
        wait_until_trained(nodes, "node0")
        plant(int(nodes.variable("node0", "MASTER_PORT")), mark)
        assert repaired.events("repair", 0) == [], "the stranger was too late"
        codes = nodes.wait()
    text = nodes.log("node0")
    assert codes == [0], text[-3000:]
    assert "a value of round_1/timed_out in the job's store is ignored" in text
    # What the stranger has overwritten is missing: the replacement gives up, and the job is restarted.
    assert ("gathered_0, which the ranks have told each other" in text) == dies
    assert not mark.exists()
    assert repaired.digests() == repaired.reference()
