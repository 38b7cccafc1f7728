"""Breakpoints: a job that is ended continues from the very iteration it was in, whatever the strategy."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.ahead_records import comparisons, train_comparing
from tests.checkpoint_job import CheckpointJob
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.faulty_runs import fault_flags
from tests.harness import digests, events, run_with_restarts
from tests.references import Digests, References

NUM_RANKS = 2
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
DENSE = ("--moe-ft-strategy", "dense", "--moe-ft-interval", "5")
PARTIAL = ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "1", "--moe-ft-k-persist", "1")
DROPOUT = ("--hidden-dropout", "0.1", "--lr-decay-style", "linear")
FP16 = ("--fp16", "--initial-loss-scale", "65536", "--loss-scale-window", "1000")
NOT_DISTRIBUTED = ("not distributed",)
PHASES = ("forward", "backward", "before-step", "in-step", "after-step")


def check_ended_in(job: CheckpointJob, phases: Sequence[str], *flags: str) -> None:
    """Have the job end once in each phase, and check that it continues in the very iteration.

    All ranks agree on that, lose nothing, and read their own node's memory only.
    """
    # A new window replaces what was recovered before the next end.
    plan = [(5 + 8 * number, phase) for number, phase in enumerate(phases)]
    faults = [f"terminate:{n % 2}@{iteration}:{phase}" for n, (iteration, phase) in enumerate(plan)]
    training = (*DROPOUT, "--train-iters", str(2 + 8 * len(phases)))
    given = [*training, "--moe-ft-breakpoints"]
    run_with_restarts(
        job.flags(*given, *flags, *fault_flags(faults)),
        NUM_RANKS,
        log_dir=job.folder,
        max_restarts=len(faults),
    )[-1].check()
    found = []
    for rank in range(NUM_RANKS):
        lines = job.events("recovery", rank)
        assert all(line["lost_tokens"] == 0 for line in lines)
        assert all(set(line["sources"]) == {"memory"} for line in lines)
        assert all(line["replayed_iterations"] == 0 for line in lines)
        found.append([line["target_iteration"] for line in lines])
    assert found[0] == found[1]
    assert len(found[0]) == len(plan)
    for (iteration, _), target in zip(plan, found[0], strict=True):
        assert target in (iteration, iteration + 1)
    assert job.digests() == job.reference(*training)


def test_job_that_is_ended_before_and_in_its_step_continues_where_it_was(
    job: CheckpointJob,
) -> None:
    check_ended_in(job, ("backward", "in-step"), *SPARSE)


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [SPARSE, DENSE, PARTIAL], ids=["sparse", "dense", "partial"])
def test_job_that_is_ended_in_any_phase_continues_where_it_was(
    job: CheckpointJob, strategy: Sequence[str]
) -> None:
    check_ended_in(job, PHASES, *strategy)


@pytest.mark.rest
@pytest.mark.parametrize(
    "flags",
    [
        (*DENSE, "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
        PARTIAL,
        (*SPARSE, *FP16),
    ],
    ids=["expert bias", "partial", "fp16"],
)
def test_record_taken_before_the_scheduler_steps_is_that_of_the_end(
    job: CheckpointJob, flags: Sequence[str]
) -> None:
    if "--fp16" in flags:
        job.base.remove("--bf16")
    job.train = partial(train_comparing, str(job.folder))
    job.run(*DROPOUT, "--moe-ft-breakpoints", *flags).check()
    found = comparisons(job.folder)
    assert len(found) == NUM_RANKS
    for of_rank in found:
        assert len(of_rank) >= 3  # fp16 skips the first iterations
        assert not any(of_rank.values())


@pytest.mark.rest
def test_survivors_breakpoints_and_the_dead_ranks_snapshot_make_a_state(
    job: CheckpointJob, expected: Digests
) -> None:
    job.run_with_faults("kill:1@4:backward", flags=["--moe-ft-breakpoints"])
    ((restored, target),) = job.recovered()
    assert restored == target >= 3  # that of 4 may not have been complete when the rank was killed
    left = job.events("breakpoint")[0]
    assert left["problem"] == "" and left["iteration"] == 4
    assert job.digests() == expected


@pytest.mark.rest
def test_rank_that_hangs_in_the_middle_of_its_step_leaves_no_breakpoint(
    job: CheckpointJob, expected: Digests
) -> None:
    # The other rank has stepped its first optimizer, and waits for this one's weights.
    job.run_with_faults("kill:1@4:before-step", flags=["--moe-ft-breakpoints"])
    left = job.events("breakpoint")[0]
    assert "mixture" in left["problem"] or left["iteration"] == 4
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.parametrize(
    "flags",
    [
        (*SPARSE, *FP16, "--moe-ft-replication-factor", "0"),
        (*DENSE, *NOT_DISTRIBUTED),
        (*PARTIAL, *NOT_DISTRIBUTED, "--moe-ft-sharding", "adaptive"),
    ],
    ids=["sparse fp16", "dense not distributed", "partial adaptive"],
)
def test_job_with_a_pipeline_continues_where_it_was(
    flags: Sequence[str],
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    references: References,
) -> None:
    base = [
        *model_flags(train_iters=30),
        *layout_flags({"pp": 2, "ep": 2}),
        *dataset_flags,
        *DROPOUT,
    ]
    base += [word for word in flags if word in (*FP16, *NOT_DISTRIBUTED)]
    if NOT_DISTRIBUTED[0] in base:
        base = [
            word for word in base if word not in (NOT_DISTRIBUTED[0], "--use-distributed-optimizer")
        ]
    if FP16[0] in base:
        base.remove("--bf16")
    own = [word for word in flags if word not in (*FP16, *NOT_DISTRIBUTED)]
    faults = ["terminate:3@8:backward", "terminate:0@16:before-step", "terminate:1@23:after-step"]
    log = tmp_path / "events"
    run_with_restarts(
        [
            *base,
            *own,
            *event_flags(log),
            *("--moe-ft-breakpoints", "--moe-ft-job-id", "test"),
            *("--moe-ft-memory-dir", str(memory_dir), *fault_flags(faults)),
        ],
        4,
        log_dir=tmp_path,
        max_restarts=len(faults),
    )[-1].check()
    for rank in range(4):
        lines = events(log, rank, "recovery")
        assert [line["replayed_iterations"] for line in lines] == [0, 0, 0]
        assert [line["lost_tokens"] for line in lines] == [0, 0, 0]
        for line, iteration in zip(lines, (8, 16, 23), strict=True):
            assert line["target_iteration"] in (iteration, iteration + 1)
    assert digests(log, 4) == references.digests(base, 4)
