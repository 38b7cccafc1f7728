"""Lost nodes without a spare: a node that trains runs their ranks, too, and no bit tells.

A rank is stopped in its backward pass. Then all processes of its node are killed, and its memory is lost.
"""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from moe_ft.loop.refusing import EXIT_REFUSED
from tests.harness import DEADLINE_S
from tests.jobs import DENSE, LOCAL, RepairedJob
from tests.kept_job import ROOT
from tests.kept_nodes import KeptNodes
from tests.waiting import wait_for

SPARSE = ("sparse", "--moe-ft-window", "2")
FP16: Mapping[str, Any] = {"bf16": False, "fp16": True, "initial_loss_scale": 1024}
EVALUATED: Mapping[str, Any] = {"sequence_parallel": True, "eval_interval": 3, "eval_iters": 1}


class Case(NamedTuple):
    """Job of four ranks.

    Attributes:
        lost: nodes, one after the other, each in the backward pass of its first rank.
    """

    layout: Mapping[str, int]
    strategy: Sequence[str] = DENSE
    changes: Mapping[str, Any] = {}
    lost: Sequence[int] = (3,)
    ranks_per_node: int = 1


CASES = {
    "a node of two ranks is a whole stage": Case({"pp": 2}, lost=(1,), ranks_per_node=2),
    "only the stage runs again": Case({"pp": 2, "ep": 2}, (*SPARSE, *LOCAL)),
}
OTHERS = {
    "sparse": Case({"pp": 2}, SPARSE),
    "contexts": Case({"cp": 2}),
    "experts on one rank": Case({"pp": 2, "ep": 2}),
    "tensors, evaluated": Case({"tp": 2}, changes=EVALUATED),
    "fp16": Case({"pp": 2}, changes=FP16),
    "all of a stage": Case({"pp": 2, "ep": 2}, lost=(3, 2)),
    "all of a pipeline": Case({"pp": 2}, lost=(1, 3)),
}


class CrowdedJob:
    """Nodes of a job without a spare, of which some are lost."""

    def __init__(
        self, job: RepairedJob, case: Case, faults: Sequence[str], num_nodes: int, **changes: Any
    ) -> None:
        self._job = job
        job.num_ranks = 4
        split = ("--split", "60,20,20") if "eval_iters" in case.changes else ()
        changes = {"attention_dropout": 0.1, **case.changes, **changes}
        flags = job.flags(faults, case.strategy, case.layout, split, changes)
        self.names = [f"node{number}" for number in range(num_nodes)]
        num_training = 4 // case.ranks_per_node
        self.nodes = KeptNodes(
            job.folder,
            [str(ROOT / "pretrain_gpt_moe.py"), *flags],
            num_nodes=num_training,
            ranks_per_node=case.ranks_per_node,
            lost_after_s=3,
            store=num_training if num_nodes > num_training else 0,
        )

    @property
    def log(self) -> str:
        return "".join(map(self.nodes.log, self.names))

    def lose(self, node: int, rank: int) -> None:
        """Lose a node with its memory once a rank has stopped."""
        path = self._job.events_dir / f"rank_{rank:05d}.jsonl"
        wait_for(
            lambda: path.exists() and '"fault_injected"' in path.read_text(),
            f"the stop of rank {rank}",
            DEADLINE_S,
        )
        self.nodes.kill(f"node{node}")
        for each in self._job.memory_dir.glob(f"*/node{node}"):
            shutil.rmtree(each)

    def check(
        self, codes: Mapping[str, int], lost: Sequence[int], survivors: Sequence[int]
    ) -> None:
        """Check that the others have trained to the end, and that no bit tells of what was lost."""
        live = [name for number, name in enumerate(self.names) if number not in lost]
        assert codes == dict.fromkeys(live, 0), self.log[-6000:]
        for number in lost:
            assert f"also runs ranks of node node{number}" in self.log
        for rank in survivors:
            assert len({each["pid"] for each in self._job.events("start", rank)}) == 1
        assert self._job.digests() == self._job.reference()


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(each, marks=pytest.mark.rest) for each in OTHERS)]
)
def test_node_that_trains_runs_the_ranks_of_a_lost_one(repaired: RepairedJob, name: str) -> None:
    case = {**CASES, **OTHERS}[name]
    first_ranks = [node * case.ranks_per_node for node in case.lost]
    faults = [f"stop:{rank}@{4 + 2 * at}:backward" for at, rank in enumerate(first_ranks)]
    job = CrowdedJob(repaired, case, faults, 4 // case.ranks_per_node)
    with job.nodes as nodes:
        nodes.start(*job.names)
        for node, rank in zip(case.lost, first_ranks, strict=True):
            job.lose(node, rank)
        codes = nodes.wait()
    again = {rank + each for rank in first_ranks for each in range(case.ranks_per_node)}
    job.check(codes, case.lost, sorted({*range(4)} - again))


@pytest.mark.rest  # in make test a seed of test_chaos.py loses two nodes
def test_node_that_runs_the_ranks_of_a_lost_one_is_lost_too_and_one_that_comes_gets_them_back(
    repaired: RepairedJob,
) -> None:
    faults = ("stop:3@4:backward", "stop:0@6:backward")
    job = CrowdedJob(repaired, Case({"pp": 2}), faults, 5, train_iters=120)
    with job.nodes as nodes:
        nodes.start(*job.names)
        job.lose(3, rank=3)
        job.lose(0, rank=0)
        wait_for(lambda: len(repaired.events("repair", 1)) == 2, "the repairs", DEADLINE_S)
        nodes.start("node5", first=5)
        wait_for(lambda: len(repaired.events("repair", 1)) == 3, "the way back", DEADLINE_S)
        job.names.append("node5")
        codes = nodes.wait()
    job.check(codes, [3, 0], [1, 2])
    assert "node5" in repaired.events("repair", 1)[-1]["taken_over"].values()
    assert "a node that trains runs its ranks, too (--moe-ft-without-spare)" in job.log


@pytest.mark.rest
@pytest.mark.parametrize("value", ["crowd", "auto"])
def test_job_that_cannot_crowd_is_refused_if_it_asks_for_that_and_else_ends_with_a_lost_node(
    repaired: RepairedJob, value: str
) -> None:
    case = Case({"pp": 2}, (*DENSE, "--moe-ft-replication-factor", "1"), ranks_per_node=2)
    if value == "crowd":
        case = case._replace(strategy=(*case.strategy, "--moe-ft-without-spare", "crowd"))
    job = CrowdedJob(repaired, case, ("stop:2@4:backward",), 2)
    why = "--moe-ft-replication-factor=1: 1 replicas need 2 nodes, there are 1. Lower it."
    with job.nodes as nodes:
        nodes.start(*job.names)
        if value == "crowd":
            assert nodes.wait() == dict.fromkeys(job.names, EXIT_REFUSED), job.log[-3000:]
            assert f"--moe-ft-without-spare=crowd is refused: {why} Or give" in job.log
            return
        job.lose(1, rank=2)
        assert nodes.wait() == {"node0": 1}, job.log[-3000:]
    assert f"if a node is lost and no spare is left, the job ends: {why}" in job.log
    assert "no spare is left (--moe-ft-without-spare crowd); no other node has room" in job.log
