"""Jobs of the benchmark of recovery times that fail, or end in another state."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery_time
from benchmarks.recovery_time import RECOVERY, Bench, Job, Result

JOB = Job(kind="keep", num_ranks=2, kills=(), num_iterations=2)


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
