"""Tables of the benchmark of recovery times, and its options."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery_time
from benchmarks.recovery_jobs import Job, Result
from benchmarks.recovery_moments import REPAIR_PHASES, RESTART_PHASES, Moments
from benchmarks.recovery_time import (
    RECOVERY,
    RECOVERY_HEADERS,
    Bench,
    recovery_rows,
)

JOB = Job(kind="keep", num_ranks=2, kills=(), num_iterations=2)


def moments(loop_s: float, phases: tuple[str, ...], num_redone: int = 0) -> Moments:
    return Moments(
        loop_s=loop_s,
        iteration_s=loop_s + 1,
        num_redone=num_redone,
        phases_s={name: loop_s / 4 for name in phases},
    )


FOUND = {
    "restart": [moments(each, RESTART_PHASES) for each in (16.0, 20.0, 12.0)],
    "repair": [moments(each, REPAIR_PHASES, 1) for each in (1.0, 2.0, 1.5)],
}


def test_recovery_is_compared_with_the_restart_and_its_targets() -> None:
    rows = list(recovery_rows(4, FOUND))
    assert rows == [
        ("4", "restart", "16.00 (12.00 to 20.00)", "17.00 (13.00 to 21.00)", "0", "100%", ""),
        (
            *("4", "repair", "1.50 (1.00 to 2.00)", "2.50 (2.00 to 3.00)", "1", "9%"),
            "10%: met, 1.2 s: missed",
        ),
    ]
    assert {len(row) for row in rows} == {len(RECOVERY_HEADERS)}


def run(bench: Bench, monkeypatch: pytest.MonkeyPatch, outcome: Exception | Result) -> int | None:
    """Have a job end so; return what was read."""

    def end(*args: object) -> Result:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(recovery_time, "run_job", end)
    return bench.run(RECOVERY, JOB, lambda result: len(result.logs))


def ended(digest: str) -> Result:
    """Return two ranks that have trained to the end."""
    log: list[dict[str, Any]] = [
        {"event": "start", "pid": 1},
        {"event": "state_digest", "sha256": digest, "sha256_all": digest},
        {"event": "end", "reason": "finished"},
    ]
    return Result(logs=[log, log])


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(data=[], folder=tmp_path, nvrx=tmp_path)


def test_job_that_fails_is_left_out_and_makes_the_benchmark_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(bench, monkeypatch, AssertionError("code 1\nmuch output")) is None
    assert bench.not_run == ["- recovery, 2 ranks, keep: FAILED: code 1"]
    assert bench.has_failed


def test_job_that_ends_in_another_state_makes_the_benchmark_fail(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(bench, monkeypatch, ended("a")) == 2
    assert run(bench, monkeypatch, ended("a")) == 2
    assert run(bench, monkeypatch, ended("b")) is None
    assert bench.not_run == [
        "- recovery, 2 ranks, keep: FAILED: keep ends in another state than keep"
    ]
    assert bench.has_failed
