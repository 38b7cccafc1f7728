"""The last state's way to storage: tries, pauses, the end of the tries, and the advice then."""

from itertools import chain, repeat

import pytest

from moe_ft.engine.decisions import EndVote
from moe_ft.engine.ending import Ending, EndProgress, LastState, keep_last_state
from tests.unit.moe_ft.engine.stand_ins import ManualClock

DEADLINE_S = 100.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def progress(turn: EndVote, *, saved: bool = False, failed: bool = False) -> EndProgress:
    return EndProgress(turn=turn, is_saved=saved, has_failed=failed, is_idle=not failed)


def test_state_whose_write_never_ends_is_given_up_at_the_deadline(clock: ManualClock) -> None:
    def advance(turn: EndVote) -> EndProgress:
        return EndProgress(turn=turn, is_saved=False, has_failed=False, is_idle=False)

    assert not keep_last_state(advance, lambda: None, lambda: None, DEADLINE_S, clock)
    assert clock.now == pytest.approx(DEADLINE_S, abs=1.0)


def test_try_waits_until_every_rank_has_paused(clock: ManualClock) -> None:
    turns = chain([EndVote.WAIT, EndVote.WAIT, EndVote.TRY], repeat(EndVote.GIVE_UP))
    started: list[float] = []
    keep_last_state(
        lambda turn: progress(next(turns)),
        lambda: started.append(clock.now),
        lambda: None,
        DEADLINE_S,
        clock,
    )
    assert len(started) == 1
    assert started[0] > 0.0


def ended(outcome: LastState, *, agreed: bool = True, in_memory: int | None = 6) -> Ending:
    return Ending(iteration=6, outcome=outcome, newest_in_memory=in_memory, is_agreed=agreed)


@pytest.mark.parametrize(
    ("outcome", "is_complete", "agreed", "may_lose"),
    [
        (LastState.SAVED, False, True, True),
        (LastState.SAVED, True, True, True),
        (LastState.SAVED, True, False, False),
        (LastState.UNSAVED, True, True, False),
        (LastState.UNSAVED, False, True, False),
        (LastState.NO_STORAGE, True, True, True),
        (LastState.NO_STORAGE, True, False, False),
        (LastState.NO_STORAGE, False, True, False),  # an exit flag: training continues from memory
        (LastState.NOTHING_NEW, True, True, False),
    ],
)
def test_memory_goes_when_the_last_state_is_on_storage_or_nobody_needs_it(
    outcome: LastState, is_complete: bool, agreed: bool, may_lose: bool
) -> None:
    assert ended(outcome, agreed=agreed).may_lose_memory(is_complete=is_complete) is may_lose


@pytest.mark.parametrize(
    ("outcome", "in_memory", "is_kept"),
    [
        (LastState.SAVED, None, True),
        (LastState.UNSAVED, 6, True),
        (LastState.UNSAVED, 5, False),
        (LastState.NO_STORAGE, 6, True),
        (LastState.NO_STORAGE, None, False),
        (LastState.NOTHING_NEW, None, True),
    ],
)
def test_last_state_is_kept_on_storage_or_as_the_newest_in_memory(
    outcome: LastState, in_memory: int | None, is_kept: bool
) -> None:
    assert ended(outcome, in_memory=in_memory).is_kept is is_kept


@pytest.mark.parametrize(
    ("in_memory", "expected"),
    [
        (6, "The memory of the nodes still holds it under /memory"),
        (5, "still holds the state of iteration 5 or of a later one under /memory"),
        (None, "memory of the nodes has no state of this start"),
    ],
)
def test_advice_says_where_the_newest_state_is(in_memory: int | None, expected: str) -> None:
    text = ended(LastState.UNSAVED, in_memory=in_memory).advice("/storage", "/memory", "job")
    assert "the last state (iteration 6) is not on storage (--moe-ft-persist-dir=/storage)" in text
    assert expected in text


def test_advice_blames_the_storage_only_if_the_ranks_could_agree() -> None:
    text = ended(LastState.UNSAVED, agreed=False).advice("/storage", "/memory", "job")
    assert "Start the job again on these nodes" in text


@pytest.mark.parametrize(
    ("in_memory", "expected"),
    [
        (
            None,
            "training ends at iteration 6, the memory of the nodes holds no state of this start",
        ),
        (4, "holds the state of iteration 4, and there is no --moe-ft-persist-dir"),
    ],
)
def test_iterations_that_no_memory_holds_are_named(in_memory: int | None, expected: str) -> None:
    assert expected in ended(LastState.NO_STORAGE, in_memory=in_memory).loss_without_storage()
