"""Lost nodes without a spare under `keep`: data-parallel peers play the roles of their ranks, bit for bit.

A rank is stopped in a phase of an iteration, and all processes of its node are killed with their memory. So
nobody forks it again: neither its fork server nor a spare is there.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ft.loop.refusing import EXIT_REFUSED
from tests.harness import DEADLINE_S
from tests.jobs import DENSE, PHASES, RepairedJob
from tests.kept_job import ROOT
from tests.kept_nodes import KeptNodes
from tests.references import Place
from tests.waiting import wait_for

NUM_ITERATIONS, BROKEN = 10, 4
DEPUTIES = {0: 1, 1: 0, 2: 3, 3: 2}
# Dropout, so that random numbers count.
CHANGES: Mapping[str, Any] = {"attention_dropout": 0.1, "train_iters": NUM_ITERATIONS}
PP = {"pp": 2}
SCRIPT = ROOT / "tests" / "distributed" / "scripts" / "pretrain_playing.py"
IN_TENSORS: Mapping[str, Any] = {"clip_grad": 0.0, "sequence_parallel": True}
REROUTE = ("--moe-ft-without-spare", "reroute")


class Nodes:
    """Nodes with one rank each, two pipelines of two stages unless the layout is another."""

    def __init__(
        self,
        job: RepairedJob,
        *faults: str,
        num_nodes: int = 4,
        store: int = 0,
        layout: Mapping[str, int] = PP,
        **changes: Any,
    ) -> None:
        self._job, job.num_ranks = job, 4
        strategy = (*DENSE, *REROUTE)
        flags = job.flags(faults, strategy, layout, changes={**CHANGES, **changes})
        self.names = [f"node{number}" for number in range(num_nodes)]
        self.nodes = KeptNodes(
            job.folder,
            [str(SCRIPT), *flags],
            num_nodes=4,
            ranks_per_node=1,
            lost_after_s=3,
            store=store,
        )

    def run(self, *lost: Sequence[int]) -> dict[str, int]:
        """Run the job; each time all of some ranks are stopped, lose their nodes. Return the exit codes."""
        with self.nodes as nodes:
            nodes.start(*self.names)
            for ranks in lost:
                self.lose(ranks)
            return nodes.wait()

    def lose(self, ranks: Sequence[int], then: Callable[[], None] | None = None) -> None:
        paths = [self._job.events_dir / f"rank_{rank:05d}.jsonl" for rank in ranks]
        for path in paths:
            wait_for(lambda path=path: _has_stopped(path), f"the stop in {path}", DEADLINE_S)
        self.kill(ranks)
        if then is not None:
            then()

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill all processes of the nodes of some ranks, and lose their memory."""
        names = [f"node{rank}" for rank in ranks]
        self.nodes.kill(*names)
        for name in names:
            for path in self._job.memory_dir.glob(f"*/{name}"):
                shutil.rmtree(path)

    @property
    def log(self) -> str:
        """All that was printed."""
        return "".join(map(self.nodes.log, self.names))


def _has_stopped(path: Path) -> bool:
    return path.exists() and '"fault_injected"' in path.read_text()


def shards(job: RepairedJob) -> dict[int, list[Any]]:
    """Return by dead rank the deputy and the digest of its shard at the end."""
    paths = job.events_dir.glob("shard_*.json")
    return {int(path.stem.removeprefix("shard_")): json.loads(path.read_text()) for path in paths}


def check_played(
    job: RepairedJob,
    nodes: Nodes,
    codes: dict[str, int],
    dead: Sequence[int],
    expected: Any,
    deputies: Mapping[int, int] = DEPUTIES,
) -> None:
    """Check that all others have trained to the end, and what the state of each role is then."""
    live = [rank for rank in range(4) if rank not in dead]
    there = {name for name in nodes.names if name not in {f"node{each}" for each in dead}}
    assert codes == dict.fromkeys(there, 0), nodes.log[-6000:]
    for rank in live:
        assert len({line["pid"] for line in job.events("start", rank)}) == 1
        played = {str(each): deputies[each] for each in dead}
        last = job.events("repair", rank)[-1]
        assert (last["played"], last["dead_ranks"]) == (played, [])
        assert last["recovered_iteration"] <= last["broken_iteration"]
        lines = job.events("state_digest", rank)
        assert [(each["sha256"], each["sha256_all"]) for each in lines] == [expected[rank]]
    assert shards(job) == {each: [deputies[each], expected[each][0]] for each in dead}
    logged = re.findall(r"iteration +(\d+)/ +\d+ \|", nodes.log)
    # Those of the last rank, and then of the rank that plays its role, in another file.
    assert sorted(map(int, logged)) == [*range(1, NUM_ITERATIONS + 1)], "each log line comes once"


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (3, "backward"),
        *(pytest.param(3, each, marks=pytest.mark.rest) for each in PHASES if each != "backward"),
        *(pytest.param(1, each, marks=pytest.mark.rest) for each in PHASES),
    ],
)
def test_peer_plays_the_role_of_a_rank_lost_in_any_phase_bit_for_bit(
    repaired: RepairedJob, rank: int, phase: str
) -> None:
    nodes = Nodes(repaired, f"stop:{rank}@{BROKEN}:{phase}", clip_grad=0.0)
    codes = nodes.run([rank])
    check_played(repaired, nodes, codes, [rank], repaired.reference())
    assert "no spare is left: peers play the roles of ranks" in nodes.log


@pytest.mark.rest
@pytest.mark.parametrize("rank", [1, 3])
def test_peer_plays_the_role_of_a_rank_lost_in_a_log_line_and_the_line_comes_once(
    repaired: RepairedJob, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, place = repaired.folder / "has_died", f"{rank}@{BROKEN + 1}"
    monkeypatch.setenv("DYING", f"hang:{place}")
    monkeypatch.setenv("DYING_MARKER", str(marker))
    nodes = Nodes(repaired, clip_grad=0.0)
    with nodes.nodes as running:
        running.start(*nodes.names)
        wait_for(Path(f"{marker}_{place}").exists, "the log line", DEADLINE_S)
        nodes.kill([rank])
        codes = running.wait()
    check_played(repaired, nodes, codes, [rank], repaired.reference())
    assert repaired.events("repair", 0)[-1]["broken_iteration"] == BROKEN


@pytest.mark.rest
def test_role_of_rank_0_is_played_if_a_node_without_ranks_keeps_the_store(
    repaired: RepairedJob,
) -> None:
    fault = f"stop:0@{BROKEN}:backward"
    nodes = Nodes(repaired, fault, num_nodes=5, store=4, clip_grad=0.0)
    check_played(repaired, nodes, nodes.run([0]), [0], repaired.reference())


@pytest.mark.rest
def test_clipping_is_the_same_whoever_plays_a_role(repaired: RepairedJob, place: Place) -> None:
    (place.folder / "healthy").mkdir()
    healthy = RepairedJob(replace(place, folder=place.folder / "healthy"))
    assert Nodes(healthy).run() == dict.fromkeys((f"node{rank}" for rank in range(4)), 0)
    nodes = Nodes(repaired, f"stop:3@{BROKEN}:backward")
    check_played(repaired, nodes, nodes.run([3]), [3], healthy.digests())


@pytest.mark.rest
@pytest.mark.parametrize(
    ("second", "again"),
    [(f"{BROKEN - 1}:recovery", BROKEN), ("7:forward", 7)],
    ids=["in the repair", "later"],
)
def test_second_rank_of_another_stage_is_lost_while_a_role_is_played(
    repaired: RepairedJob, second: str, again: int
) -> None:
    faults = (f"stop:3@{BROKEN}:backward", f"stop:1@{second}")
    nodes = Nodes(repaired, *faults, clip_grad=0.0)
    codes = nodes.run([3], [1])
    check_played(repaired, nodes, codes, [1, 3], repaired.reference())
    last = repaired.events("repair", 0)[-1]
    assert (last["broken_iteration"], last["round"]) == (again, 2)
    assert again - 2 <= last["recovered_iteration"] <= again, "snapshots go on"


@pytest.mark.rest
def test_idle_rank_that_is_lost_changes_nothing(repaired: RepairedJob) -> None:
    faults = (f"stop:3@{BROKEN}:backward", "stop:2@7:before-step")
    nodes = Nodes(repaired, *faults, layout={"tp": 2}, **IN_TENSORS)
    codes = nodes.run([3], [2])
    check_played(repaired, nodes, codes, [2, 3], repaired.reference(), {2: 0, 3: 1})


@pytest.mark.rest
def test_deputy_that_is_lost_leaves_a_stage_without_ranks_and_the_job_says_so(
    repaired: RepairedJob,
) -> None:
    nodes = Nodes(repaired, f"stop:3@{BROKEN}:backward", "stop:2@7:forward", clip_grad=0.0)
    assert nodes.run([3], [2]) == {"node0": 1, "node1": 1}
    assert "peers cannot play the roles of all ranks of a stage" in nodes.log


@pytest.mark.rest
def test_rank_that_dies_on_a_node_that_lives_is_forked_again_while_a_role_is_played(
    repaired: RepairedJob,
) -> None:
    nodes = Nodes(repaired, f"stop:3@{BROKEN}:backward", "kill:2@7:forward", clip_grad=0.0)
    codes = nodes.run([3])
    assert codes == dict.fromkeys(("node0", "node1", "node2"), 0), nodes.log[-6000:]
    last = repaired.events("repair", 0)[-1]
    assert (last["played"], last["dead_ranks"]) == ({"3": 2}, [2])
    expected = repaired.reference()
    assert shards(repaired) == {3: [2, expected[3][0]]}
    for rank in range(3):
        (line,) = repaired.events("state_digest", rank)
        assert line["sha256_all"] == expected[rank][1]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("layout", "changes", "played"),
    [(PP, {"clip_grad": 0.0}, {"3": 2}), ({"tp": 2}, IN_TENSORS, {"2": 0, "3": 1})],
    ids=["stages", "tensors, the rest of the group is idle"],
)
def test_node_that_comes_takes_its_ranks_back_and_no_bit_tells_that_it_was_away(
    repaired: RepairedJob,
    layout: Mapping[str, int],
    changes: Mapping[str, Any],
    played: Mapping[str, int],
) -> None:
    fault = f"stop:3@{BROKEN}:backward"
    job = Nodes(repaired, fault, layout=layout, **{**changes, "train_iters": 80})
    with job.nodes as nodes:
        nodes.start(*job.names)
        job.lose([3])
        wait_for(lambda: "roles of dead ranks are played" in job.log, "the repair", DEADLINE_S)
        nodes.start("node4", first=4)
        codes = nodes.wait()
    assert codes == dict.fromkeys(("node0", "node1", "node2", "node4"), 0), job.log[-6000:]
    first, second = repaired.events("repair", 0)
    assert (first["played"], first["dead_ranks"]) == (played, [])
    assert (second["played"], second["taken_over"]) == ({}, {"node3": "node4"})
    assert repaired.digests() == repaired.reference()


@pytest.mark.rest
def test_deputy_without_room_for_another_rank_ends_the_job_and_all_ranks_continue_it(
    repaired: RepairedJob, mount_small: Callable[[str], Path]
) -> None:
    repaired.memory_dir = mount_small("64m")
    job = Nodes(repaired, f"stop:3@{BROKEN}:backward", clip_grad=0.0)
    ballast = repaired.memory_dir / "ballast"

    def fill() -> None:
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(repaired.memory_dir).free)

    with job.nodes as nodes:
        nodes.start(*job.names)
        job.lose([3], then=fill)
        assert nodes.wait() == dict.fromkeys(("node0", "node1", "node2"), 1)
    assert "a repair cannot take up the state: --moe-ft-memory-dir" in job.log
    ballast.unlink()
    again = Nodes(repaired, clip_grad=0.0)
    with again.nodes as nodes:
        nodes.start(*again.names, restart=1)
        assert nodes.wait() == dict.fromkeys(again.names, 0), again.log[-6000:]
    for rank in range(4):
        (line,) = repaired.events("recovery", rank)
        assert BROKEN - 2 <= line["restored_iteration"] <= BROKEN
    assert repaired.digests() == repaired.reference()


@pytest.mark.rest
def test_job_in_which_roles_cannot_be_played_is_refused_at_its_start(
    repaired: RepairedJob,
) -> None:
    repaired.num_ranks = 4
    flags = repaired.flags((), ("sparse", *REROUTE), {"pp": 2}, changes=CHANGES)
    script = [str(SCRIPT), *flags]
    with KeptNodes(repaired.folder, script, num_nodes=1, ranks_per_node=4) as nodes:
        nodes.start("node0")
        assert nodes.wait()["node0"] == EXIT_REFUSED
        text = nodes.log("node0")
    assert "--moe-ft-without-spare=reroute is refused: --moe-ft-strategy=sparse" in text, text[
        -3000:
    ]
