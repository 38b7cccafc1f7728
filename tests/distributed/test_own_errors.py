"""Exceptions of one rank: it is replaced like a dead one, its batch is left out, or all ranks end."""

import re
from typing import Any

import pytest

from tests.jobs import DENSE, LOCAL, NUM_REPAIRED, PHASES, SPARSE, RepairedJob
from tests.kept_job import ROOT, KeptResult

SCRIPT = str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_raising.py")
BAD = 4  # iteration, from 0, whose batch has the bad sample
SAMPLE = f"sample:{16 * BAD + 1}"


def run(job: RepairedJob, raising: str, *flags: str, **options: Any) -> KeptResult:
    env = {"RAISING": raising, "RAISING_MARKER": str(job.folder / "has_raised")}
    return job.run(script=SCRIPT, strategy=(*DENSE, *flags), env=env, **options)


def stopped(job: RepairedJob, rank: int) -> list[tuple[int, bool]]:
    """Return the iterations in which a rank has raised, and whether it was replaced."""
    return [
        (each["iteration"], each.get("is_replaced", False)) for each in job.events("stopped", rank)
    ]


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.rest)])
def test_rank_without_memory_is_replaced_and_a_batch_that_makes_one_raise_twice_is_left_out(
    repaired: RepairedJob, workers: str
) -> None:
    extra = ("--num-workers", workers)
    run(repaired, f"memory:3@2 {SAMPLE}", "--moe-ft-skip-bad-batches", "1", extra=extra)
    for rank in range(4):
        repairs = repaired.events("repair", rank)
        dead = [(each["round"], each["dead_ranks"]) for each in repairs]
        assert dead == [(1, [3]), (3, [0])], "the second round was broken by the same exception"
        (left_out,) = repaired.events("skipped_batch", rank)
        assert (left_out["iteration"], left_out["failed_rank"]) == (BAD + 1, 0)
    assert [stopped(repaired, rank) for rank in range(4)] == [
        *([(BAD, True)] * 2, [], []),
        [(2, True)],
    ]
    assert repaired.logged() == [*range(1, NUM_REPAIRED + 1)]
    assert repaired.digests() == repaired.reference("--iterations-to-skip", str(BAD + 1))


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [DENSE, SPARSE], ids=lambda strategy: str(strategy[0]))
@pytest.mark.parametrize("phase", PHASES)
def test_rank_that_raises_is_replaced_in_every_phase(
    repaired: RepairedJob, phase: str, strategy: tuple[str, ...]
) -> None:
    repaired.run(f"exception:3@{BAD}:{phase}", strategy=strategy)
    for rank in range(4):
        (repair,) = repaired.events("repair", rank)
        assert (repair["dead_ranks"], repair["broken_iteration"]) == ([3], BAD)
        assert stopped(repaired, rank) == ([(BAD, True)] if rank == 3 else [])
    assert "InjectedFaultError: --moe-ft-inject" in (repaired.folder / "log").read_text()
    assert repaired.digests() == repaired.reference()


@pytest.mark.rest
def test_replacement_that_is_forked_later_leaves_the_same_batch_out(repaired: RepairedJob) -> None:
    # The state after the iteration that was left out is not there: what runs again begins before it.
    fault = ("--moe-ft-inject-fault", f"kill:2@{BAD + 1}:forward")
    run(repaired, SAMPLE, "--moe-ft-skip-bad-batches", "1", *fault)
    last = [repaired.events("repair", rank)[-1] for rank in range(4)]
    assert {(each["broken_iteration"], each["recovered_iteration"]) for each in last} == {
        (BAD + 1, BAD)
    }
    assert len(repaired.events("skipped_batch", 0)) == 1
    assert repaired.digests() == repaired.reference("--iterations-to-skip", str(BAD + 1))


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [SPARSE, (*DENSE, *LOCAL)], ids=["sparse", "local"])
def test_batch_is_left_out_whatever_the_strategy_and_with_virtual_stages(
    repaired: RepairedJob, strategy: tuple[str, ...]
) -> None:
    changes = {"num_layers_per_virtual_pipeline_stage": 1} if strategy is SPARSE else {}
    skip = ("--moe-ft-skip-bad-batches", "1")
    env = {"RAISING": SAMPLE, "RAISING_MARKER": ""}
    repaired.run(strategy=(*strategy, *skip), script=SCRIPT, env=env, changes=changes)
    assert len(repaired.events("skipped_batch", 3)) == 1
    if not changes:  # Megatron's own way fails with virtual stages
        assert repaired.digests() == repaired.reference("--iterations-to-skip", str(BAD + 1))


def test_exception_that_comes_again_after_a_repair_ends_the_job(repaired: RepairedJob) -> None:
    with pytest.raises(AssertionError, match="another start would end in the same way: rank 0"):
        run(repaired, SAMPLE, num_ranks=2, layout={}, max_restarts=1)
    assert stopped(repaired, 0) == [(BAD, True), (BAD, False)]
    text = (repaired.folder / "log").read_text()
    assert re.search(r"rank 0 has raised .* again in iteration 4, for which it was replaced", text)
