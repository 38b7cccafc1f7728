"""Jobs that are killed again and again: their layouts, kills and flags, and refusals of these."""

from pathlib import Path

import pytest

from benchmarks.recovery_jobs import (
    KINDS,
    SCRIPT,
    Job,
    NotRunError,
    kills_of,
    layout_of,
    raise_if_refused,
    run_job,
)
from benchmarks.recovery_moments import Answer, Expected
from benchmarks.sparse_jobs import JobFolder

PLACE = JobFolder(log=Path("log"), memory=Path("memory"))


def job(kind: str, num_ranks: int = 4) -> Job:
    return Job(kind=kind, num_ranks=num_ranks, kills=[4, 10], num_iterations=12)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(2, {"pp": 2, "ep": 1}), (4, {"pp": 2, "ep": 2}), (8, {"pp": 4, "ep": 2})],
)
def test_every_layout_has_stages_that_stay_whole(num_ranks: int, layout: dict[str, int]) -> None:
    assert layout_of(num_ranks) == layout


def test_kills_come_after_a_window_and_a_whole_one_apart() -> None:
    assert kills_of(3) == [4, 10, 16]


def test_job_kills_its_highest_rank_in_each_of_the_iterations() -> None:
    flags = job("restart").flags(["--data-path", "text"], PLACE)
    faults = [after for word, after in zip(flags, flags[1:], strict=False) if "fault" in word]
    assert faults == ["kill:3@4:backward", "kill:3@10:backward"]
    assert flags[flags.index("--train-iters") + 1] == "12"


@pytest.mark.parametrize("kind", KINDS)
def test_expectation_of_a_job_is_that_of_its_kind(kind: str) -> None:
    assert job(kind, 8).expected == Expected(
        answer=KINDS[kind].answer, killed=7, kills=[4, 10], is_local=kind == "whole"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_that_repair_and_only_they_have_the_flag(kind: str) -> None:
    assert ("--moe-ft-repair" in KINDS[kind].flags) is (KINDS[kind].answer is Answer.REPAIR)


def test_refusal_is_no_failure_and_keeps_its_reason() -> None:
    output = (
        f"moe_ft: on\n{SCRIPT}: error: --moe-ft-repair=auto does not work. Leave it out.\nmore\n"
    )
    with pytest.raises(NotRunError, match=r"^--moe-ft-repair=auto does not work. Leave it out.$"):
        raise_if_refused(output, AssertionError())


def test_failure_is_no_refusal() -> None:
    raise_if_refused("Traceback\nRuntimeError: error: no\n", AssertionError())


def test_peer_that_is_not_installed_is_not_run(tmp_path: Path) -> None:
    with pytest.raises(NotRunError, match=f"pip install --no-deps --target {tmp_path}/nvrx"):
        run_job(job("nvrx"), [], tmp_path, tmp_path / "nvrx")
