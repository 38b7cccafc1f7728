"""State that is packed and kept in other formats is recovered as exactly as these formats keep it."""

import pytest

from moe_ft.commands.report import render
from moe_ft.recovery.inspect.holdings import find_holdings, render_holdings
from tests.jobs import NUM_ITERATIONS, CheckpointJob
from tests.unit.moe_ft.commands.runs import summarize

Digests = list[tuple[str, str]]
KILL = "kill:1@4:backward"
STATE_DTYPE = "--moe-ft-state-dtype"
SMALL_STAGING = ("--moe-ft-staging-bytes", "1MiB")
SPLIT = (STATE_DTYPE, "master=split", *SMALL_STAGING)
LOSSY = (STATE_DTYPE, "master=fp16,exp_avg=bf16,exp_avg_sq=fp8-e4m3-block")
ALLOWED = "--moe-ft-allow-lossy"
KEPT = {"exp_avg": "bf16", "exp_avg_sq": "fp8-e4m3-block", "param": "fp16"}


def shown(job: CheckpointJob) -> str:
    """Return the output of `inspect` on the storage."""
    return render_holdings(find_holdings(str(job.storage)), lists_units=False)


def test_lossy_formats_are_stated_by_the_event_log_report_and_inspect(
    job: CheckpointJob, expected: Digests
) -> None:
    first, *_ = job.run_with_faults(KILL, flags=[*LOSSY, ALLOWED], storage=True)
    assert "WARNING moe_ft: snapshots keep master as fp16, exp_avg as bf16" in first.output(0)
    start = job.events("start")[0]
    assert start["lossy"] == {"master": "fp16", "exp_avg": "bf16", "exp_avg_sq": "fp8-e4m3-block"}
    (recovery,) = job.events("recovery")
    assert recovery["lossy"] == KEPT
    assert "LOSSY: it keeps exp_avg as bf16, exp_avg_sq as fp8-e4m3-block, param as fp16" in shown(
        job
    )
    report = render(summarize(job.events_dir))
    assert "exp_avg bf16, exp_avg_sq fp8-e4m3-block, param fp16" in report
    assert job.events("iteration")[-1]["iteration"] == NUM_ITERATIONS
    assert job.digests() != expected


@pytest.mark.rest
def test_partial_strategy_keeps_lossy_formats_without_further_ado(job: CheckpointJob) -> None:
    job.run_with_faults(
        KILL, flags=[*LOSSY, "--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "2"]
    )
    assert job.events("recovery")[0]["lossy"] == KEPT


@pytest.mark.rest
def test_formats_may_change_between_starts(job: CheckpointJob, expected: Digests) -> None:
    job.run(*SPLIT, "--exit-interval", "2", storage=True).check()
    job.run("--exit-interval", "4", storage=True).check()
    job.run(*SPLIT, storage=True).check()
    assert job.recovered() == [(2, 2), (4, 4)]
    assert job.digests() == expected
    job.run(*LOSSY, ALLOWED, "--train-iters", "8", "--exit-interval", "7", storage=True).check()
    job.run("--train-iters", "8", storage=True).check()
    assert [line["lossy"] for line in job.events("recovery")] == [{}, {}, {}, KEPT]
    assert job.recovered()[2:] == [(6, 6), (7, 7)]


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_versions_of_other_formats_have_room_in_the_slots_of_a_start(job: CheckpointJob) -> None:
    partial = ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "1")
    fault = "--moe-ft-inject-fault"
    formats = [SPLIT, (*LOSSY, ALLOWED), ()]
    for flags, kill in zip(formats, ("kill:1@3:backward", "kill:0@4:backward", ""), strict=True):
        job.run(*partial, *flags, *((fault, kill) if kill else ()))
    recoveries = job.events("recovery")
    assert [line["problems"] for line in recoveries] == [[], []]
    assert [line["lossy"] for line in recoveries] == [{}, KEPT]
    assert job.events("degraded") == []
    assert job.events("end")[-1]["iteration"] == NUM_ITERATIONS
