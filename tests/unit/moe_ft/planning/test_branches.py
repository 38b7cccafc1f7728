"""Branches of a run: what is alive of it, what a start remembers, whose work comes first."""

from collections.abc import Mapping

import pytest

from moe_ft.format.identity import Start
from moe_ft.planning.branches import (
    MOST_STARTS,
    continue_history,
    is_alive,
    names_to_supersede,
    number_of_next,
    order_starts,
)
from tests.unit.moe_ft.builders import make_history

# Start 0 got beyond 8, start 1 went on from there, start 2 went back to 6.
RUN = make_history([(0, 0), (1, 4), (2, 6)])
FIRST, SECOND, THIRD = RUN


def named(*names: str) -> list[Start]:
    return [Start(number=number, resumed_at=0, name=name) for number, name in enumerate(names)]


def ordered(progress: Mapping[str, int], known: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names of starts in their order."""
    starts = {name: Start(number=0, resumed_at=0, name=name) for name in progress}
    found = order_starts(
        {starts[name]: iteration for name, iteration in progress.items()},
        {each: frozenset(known.get(name, ())) for name, each in starts.items()},
    )
    return [each.name for each in found]


@pytest.mark.parametrize(
    ("writer", "iteration", "expected"),
    [(0, 4, True), (0, 5, False), (1, 6, True), (1, 7, False), (2, 99, True)],
)
def test_state_of_a_start_of_the_run_is_alive_up_to_where_a_later_one_resumed(
    writer: int, iteration: int, expected: bool
) -> None:
    assert is_alive(iteration, RUN[: writer + 1], RUN) == expected


def test_state_of_a_start_that_is_not_of_the_run_is_not_alive() -> None:
    other = (FIRST, Start(number=1, resumed_at=4, name="unknown"))
    assert not is_alive(4, other, RUN)


def test_state_of_a_start_that_the_run_has_not_come_to_yet_is_not_alive() -> None:
    assert not is_alive(5, RUN[:2], RUN[:1])


def test_history_of_a_start_that_goes_back_leaves_out_what_resumed_after_that_point() -> None:
    again = Start(number=3, resumed_at=5, name="again")
    assert continue_history(RUN, again) == (FIRST, SECOND, again)


def test_history_of_a_start_keeps_what_resumed_at_its_own_point() -> None:
    again = Start(number=3, resumed_at=6, name="again")
    assert continue_history(RUN, again) == (*RUN, again)


def test_history_of_very_many_starts_keeps_the_latest() -> None:
    history = make_history([(number, 0) for number in range(MOST_STARTS)])
    last = Start(number=MOST_STARTS, resumed_at=0, name="last")
    assert continue_history(history, last) == (*history[1:], last)


def test_history_of_very_many_starts_keeps_those_that_a_user_has_chosen() -> None:
    chosen = Start(number=0, resumed_at=0, name="chosen", is_chosen=True)
    history = (chosen, *make_history([(number, 0) for number in range(1, MOST_STARTS + 9)]))
    last = Start(number=MOST_STARTS + 9, resumed_at=0, name="last")
    assert continue_history(history, last)[0] == chosen


def test_number_of_the_next_start_is_greater_than_all_that_were_found() -> None:
    assert number_of_next([SECOND, THIRD, FIRST]) == 3
    assert number_of_next([]) == 0


def test_start_remembers_what_it_found_in_that_order_without_its_own_past() -> None:
    own = tuple(named("a", "c"))
    assert names_to_supersede(["x", "a", "", "y", "c", "z"], own) == ("x", "y", "z")


def test_start_that_found_very_many_remembers_the_latest() -> None:
    found = [str(number) for number in range(MOST_STARTS + 3)]
    assert names_to_supersede(found, tuple(named("own"))) == tuple(found[3:])


def test_start_that_knew_of_another_comes_first_whatever_they_got_done() -> None:
    assert ordered({"a": 100, "b": 3}, {"b": ("a",)}) == ["b", "a"]


def test_of_starts_that_knew_nothing_of_each_other_the_one_that_got_further_comes_first() -> None:
    assert ordered({"a": 5, "b": 9, "c": 7}, {}) == ["b", "c", "a"]


def test_order_of_starts_that_met_and_others_that_did_not_is_that_worked_by_hand() -> None:
    # Nobody knew of d; c comes after a and b, which knew nothing of each other.
    progress = {"a": 50, "b": 40, "c": 8, "d": 10}
    assert ordered(progress, {"c": ("a", "b")}) == ["d", "c", "a", "b"]


def test_order_of_starts_that_damage_has_made_know_each_other_still_has_all_of_them() -> None:
    assert ordered({"a": 5, "b": 9, "c": 7}, {"a": ("b",), "b": ("a",), "c": ("c",)}) == [
        "b",
        "a",
        "c",
    ]
