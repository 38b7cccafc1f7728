"""The failure that has caused the others, and whether the next start would end by it, too."""

from dataclasses import replace

import pytest

from moe_ft.verdicts import Failure, FailureKind, comes_again, first_of

FAILURE = Failure(rank=1, kind=FailureKind.CODE, what="ValueError: X", iteration=3, time_s=5.0)


def failure(rank: int, kind: FailureKind, time_s: float) -> Failure:
    return Failure(rank=rank, kind=kind, what="X", iteration=3, time_s=time_s)


@pytest.mark.parametrize(
    ("others", "first"),
    [
        ([(0, FailureKind.NETWORK, 1.0)], 1),  # clocks differ
        ([(0, FailureKind.TIME_LIMIT, 1.0)], 1),
        ([(0, FailureKind.CODE, 6.0)], 1),
        ([(2, FailureKind.HANG, 4.0), (3, FailureKind.KILLED, 4.5)], 2),
        ([(0, FailureKind.DATA, 5.0)], 0),  # of the same time, the first rank
    ],
)
def test_cause_comes_before_what_it_causes(
    others: list[tuple[int, FailureKind, float]], first: int
) -> None:
    found = first_of([FAILURE, *(failure(*each) for each in others)])
    assert found is not None and found.rank == first


def test_ranks_that_lost_each_other_come_before_those_that_were_told_to_end() -> None:
    told, lost = failure(0, FailureKind.TIME_LIMIT, 1.0), failure(1, FailureKind.NETWORK, 2.0)
    assert first_of([told, lost]) == lost and first_of([told]) == told and first_of([]) is None


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({}, True),
        ({"rank": 0}, True),
        ({"time_s": 9.0, "node": "b"}, True),
        ({"iteration": 4}, False),
        ({"what": "ValueError: Y"}, False),
        ({"kind": FailureKind.DATA}, False),
    ],
)
def test_same_failure_of_two_starts_comes_again(changes: dict[str, object], again: bool) -> None:
    assert comes_again(replace(FAILURE, **changes), FAILURE) is again  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FailureKind)
def test_only_mistakes_and_lack_of_memory_come_again(kind: FailureKind) -> None:
    each = replace(FAILURE, kind=kind)
    again = (FailureKind.CODE, FailureKind.DATA, FailureKind.OUT_OF_MEMORY)
    assert comes_again(each, each) is (kind in again)
    assert not comes_again(each, None) and not comes_again(None, each)


def test_recovery_may_go_on_from_another_state_next_time() -> None:
    each = replace(FAILURE, section="recovery")
    assert not comes_again(each, each)
