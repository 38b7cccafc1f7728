"""The benchmark of local recoveries: the formula of its bubble, and jobs that end in another state."""

from dataclasses import replace

import pytest

from benchmarks.local_recovery import Case, Result, Schedule, check_digests, expected_ratio

SLEEPING = Case(num_stages=3, num_microbatches=6, num_recoveries=2, stage_s=(0.03, 0.06))
COMPUTING = replace(SLEEPING, stage_s=(0.0, 0.0))
CASES = [SLEEPING, COMPUTING, replace(SLEEPING, keeps=False)]


def result(digest: str) -> Result:
    return Result(recoveries=[], digests=[(digest, digest)] * 3, logs=[])


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_cores", "ratio"),
    [
        (2, 4, None, 4 / 5),
        (3, 7, None, 7 / 9),  # Fig. 9 of MoEvement prints 23 % less
        (8, 4, None, 4 / 11),
        (8, 4, 2, 4 / 16),
        (2, 4, 2, 4 / 5),
        (4, 8, 1, 8 / 32),
    ],
)
def test_expected_ratio_is_as_counted_by_hand(
    num_stages: int, num_microbatches: int, num_cores: int | None, ratio: float
) -> None:
    schedule = Schedule(num_stages=num_stages, num_microbatches=num_microbatches)
    assert expected_ratio(schedule, num_cores) == pytest.approx(ratio)


@pytest.mark.parametrize("case", CASES)
def test_job_that_ends_in_another_state_is_refused(case: Case) -> None:
    found = {each: {"local": result("a"), "global": result("a")} for each in CASES}
    check_digests(found)
    found[case]["global"] = result("b")
    with pytest.raises(AssertionError, match="ends in another state than"):
        check_digests(found)
