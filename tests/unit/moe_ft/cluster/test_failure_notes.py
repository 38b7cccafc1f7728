"""A failure is repaired once; what follows when it comes again is the same for all who ask."""

from dataclasses import replace

import pytest

from moe_ft.cluster.failure_notes import Consequence, FailureNotes, left_out_by
from moe_ft.verdicts import LIKELY_AGAIN, Failure, FailureKind
from tests.unit.signed import LookedAt, signed

BAD = Failure(rank=1, kind=FailureKind.DATA, what="ValueError: sample 7", iteration=4)


def answers(*failures: Failure, room: int = 0) -> list[Consequence]:
    """Return what follows failures, each of a new process, if so many iterations may be left out."""
    store = LookedAt()

    def answer(failure: Failure) -> Consequence:
        notes = FailureNotes(signed(store))
        return notes.answer(failure, lambda: len(left_out_by(notes.left_out())) < room)

    return [answer(each) for each in failures]


def test_same_failure_is_repaired_once_and_others_are_repaired_again() -> None:
    others = [
        replace(BAD, rank=0),
        replace(BAD, iteration=5),
        replace(BAD, what="KeyError: 3"),
        replace(BAD, kind=FailureKind.CODE),
    ]
    found = answers(BAD, *others, BAD)
    assert found == [Consequence.REPLACE] * 5 + [Consequence.END]


def test_iteration_is_left_out_while_there_is_room_and_a_third_failure_in_it_ends_all() -> None:
    later = replace(BAD, iteration=6)
    found = answers(BAD, BAD, later, later, BAD, room=1)
    assert found == [
        Consequence.REPLACE,
        Consequence.LEAVE_OUT,
        Consequence.REPLACE,
        Consequence.END,
        Consequence.END,
    ]


def test_second_rank_that_fails_with_the_same_batch_needs_no_further_room() -> None:
    other = replace(BAD, rank=3)
    found = answers(BAD, other, BAD, other, room=1)
    assert found == [Consequence.REPLACE] * 2 + [Consequence.LEAVE_OUT] * 2


@pytest.mark.parametrize("kind", FailureKind)
def test_only_failures_of_batches_leave_iterations_out(kind: FailureKind) -> None:
    failure = replace(BAD, kind=kind)
    last = Consequence.LEAVE_OUT if kind in LIKELY_AGAIN else Consequence.END
    assert answers(failure, failure, room=9) == [Consequence.REPLACE, last]


def test_iterations_that_are_left_out_come_with_their_failures() -> None:
    store = LookedAt()
    for _ in range(2):
        FailureNotes(signed(store)).answer(BAD, lambda: True)
    assert left_out_by(FailureNotes(signed(store)).left_out()) == {4: BAD}
