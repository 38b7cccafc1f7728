"""Repairs of real jobs over the stand-in for NCCL: ranks die in each phase of an iteration or a repair."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, override

import pytest

from moe_ft.planning import levels
from tests.device.communicators import CONFLICT, NOTICES
from tests.device.nccl_program import FAN_OUT, train_on_nccl, train_with_defaults_of_gpus
from tests.jobs import DENSE, LEAVING, LOCAL, PHASES, PP_EP, SPARSE, CheckpointJob, Job, RepairedJob
from tests.references import Digests, Place, References
from tests.shares import share_of

SCRIPT = "tests/device/nccl_program.py"
TWO = {"ep": 2}
ON_NCCL = {"distributed_backend": "nccl"}
DEADLINE_S = 300.0


class _Late(Job):
    """Job over late collectives, with the defaults of GPUs. Over gloo it has to end in the same way."""

    @override
    def reference(self, *flags: str) -> Digests:
        words = ("--distributed-backend", "nccl")
        own = [each for each in self.base if each not in words]
        job = [*own, *flags]
        return self.place.references.digests(job, self.num_ranks, train_with_defaults_of_gpus)


class LateJob(_Late, RepairedJob):
    """Job whose dead ranks are replaced in place."""

    def repair(
        self,
        *faults: str,
        notices: bool = False,
        fan_out: int = levels.FAN_OUT,
        layout: Mapping[str, int] = TWO,
        changes: Mapping[str, Any] | None = None,
        strategy: Sequence[str] = DENSE,
        **options: Any,
    ) -> str:
        """Run the job to its end; return what it has printed."""
        env = {NOTICES: str(int(notices)), FAN_OUT: str(fan_out)}
        changes = {**ON_NCCL, **(changes or {})}
        num_ranks = 2 if layout == TWO else 4
        given: dict[str, Any] = {
            "script": SCRIPT,
            "strategy": (*strategy, "--moe-ft-allow-untested", "repair"),
            "env": env,
            "deadline_s": DEADLINE_S,
            "num_ranks": num_ranks,
        }
        self.run(*faults, layout=layout, changes=changes, **given, **options)
        text = (self.folder / "log").read_text()
        assert "it sets TORCH_NCCL_" in text, "the job has the paths for GPUs"
        assert "on GPUs, written and never seen on one: strategy" in text
        assert "launch, NCCL, repair in place (docs/gpus.md)" in text
        assert CONFLICT not in text
        return text


class LateCheckpoints(_Late, CheckpointJob):
    """Job that leaves breakpoints, and is started again."""


@pytest.fixture
def place(dataset_flags: list[str], tmp_path: Path, memory_dir: Path, shared_folder: Path) -> Place:
    references = References(shared_folder / "references")
    return Place(dataset_flags, tmp_path, memory_dir, references)


@pytest.fixture
def job(place: Place) -> LateJob:
    return LateJob(place)


@pytest.mark.parametrize("phase", share_of(PHASES, "backward"))
@pytest.mark.parametrize("rank", share_of((0, 1), 1))
def test_dead_rank_is_replaced_and_the_result_has_the_same_bits(
    job: LateJob, rank: int, phase: str
) -> None:
    job.repair(f"kill:{rank}@4:{phase}")
    job.check([rank], [4], [{3, 4}])


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [DENSE, SPARSE], ids=lambda strategy: str(strategy[0]))
@pytest.mark.parametrize(("rank", "phase"), zip((0, 1, 2, 3), PHASES, strict=True))
def test_dead_rank_of_a_pipeline_with_experts_is_replaced(
    job: LateJob, rank: int, phase: str, strategy: Sequence[str]
) -> None:
    job.repair(f"kill:{rank}@4:{phase}", layout=PP_EP, strategy=strategy)
    job.check([rank], [4], [{3, 4} if strategy is DENSE else {3}])


@pytest.mark.rest
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_rank_that_leads_others_or_none_in_levels_of_groups_is_replaced(
    job: LateJob, rank: int
) -> None:
    job.repair(f"kill:{rank}@4:backward", layout=PP_EP, fan_out=2)
    job.check([rank], [4], [{3, 4}])


@pytest.mark.rest
def test_communicators_that_notice_a_death_are_ended_like_others(job: LateJob) -> None:
    job.repair("kill:1@4:backward", notices=True)
    job.check([1], [4], [{3, 4}])


@pytest.mark.rest
@pytest.mark.parametrize("flag", ["overlap_grad_reduce", "overlap_param_gather"])
def test_collectives_beside_the_computation_end_too(job: LateJob, flag: str) -> None:
    changes = {"overlap_grad_reduce": True, flag: True}
    job.repair("kill:1@4:backward", changes=changes)
    job.check([1], [4], [{3, 4}])


@pytest.mark.rest
@pytest.mark.parametrize(
    ("fault", "scopes"), [("kill:3@5:backward", {"local"}), ("kill:3@5:in-step", {"global"})]
)
def test_survivors_keep_their_state_unless_the_broken_iteration_has_made_it(
    job: LateJob, fault: str, scopes: set[str]
) -> None:
    job.repair(fault, layout=PP_EP, strategy=(*SPARSE, *LOCAL))
    assert {job.events("repair", rank)[0]["scope"] for rank in range(4)} == scopes
    assert job.digests() == job.reference()


@pytest.mark.rest
@pytest.mark.parametrize(
    ("second", "dead", "strategy"),
    [
        ("kill:3@3:recovery", {3}, SPARSE),
        ("kill:1@3:recovery", {0, 1, 3}, DENSE),  # rank 0 was making a communicator with it
        ("kill:1@3:recovery", {0, 1, 3}, (*SPARSE, *LOCAL)),
        ("kill:2@4:after-step", {2, 3}, SPARSE),
    ],
)
def test_rank_that_dies_in_a_repair_is_replaced_in_the_next_round(
    job: LateJob, second: str, dead: set[int], strategy: Sequence[str]
) -> None:
    job.repair("kill:3@4:forward", second, layout=PP_EP, strategy=strategy)
    for rank in range(4):
        (found,) = job.events("repair", rank)
        assert set(found["dead_ranks"]) == dead
        assert found["round"] == 2
        assert found["broken_iteration"] == 4
    assert job.digests() == job.reference()


@pytest.mark.rest
def test_rank_that_others_wait_for_too_long_ends_itself(job: LateJob) -> None:
    text = job.repair("hang:1@4:backward", extra=("--distributed-timeout-minutes", "1"))
    job.check([1], [4], [{3, 4}])
    assert "NCCL reports TIMEOUT in group" in text


@pytest.mark.rest
@pytest.mark.parametrize("fault", LEAVING)
def test_ranks_that_leave_abort_what_hangs_and_leave_a_breakpoint(place: Place, fault: str) -> None:
    job = LateCheckpoints(place)
    job.train = train_on_nccl
    job.set_model(2, TWO, **ON_NCCL)
    breakpoints = ("--moe-ft-breakpoints", "--moe-ft-fault-report-grace-s", "3")
    job.run_with_faults(fault, flags=breakpoints, has_breakpoints=True)
    assert job.digests() == job.reference()
    survivors = {0, 1} - ({int(fault[5])} if fault.startswith("kill") else set())
    for rank in survivors:
        assert [each["problem"] for each in job.events("breakpoint", rank)] == [""]
    if fault.startswith("kill:1"):  # rank 0 keeps the job's store
        assert [each["silent_ranks"] for each in job.events("stopped", 0)] == [[1]]
