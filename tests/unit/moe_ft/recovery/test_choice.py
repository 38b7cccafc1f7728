"""Choosing what the flags of a start ask for, on its first start and on restarts of its launcher."""

import re

import pytest

from moe_ft.errors import ConfigError
from moe_ft.planning.recovery import Version
from moe_ft.recovery.choice import Choice, Wish, choose, without_left
from tests.unit.moe_ft.recovery.starts import plans_of, start, versions_of, wish

FIRST = (start(0, 0),)
CHOSEN = (*FIRST, start(1, 8, is_chosen=True))  # --moe-ft-recover-from iter_8, after 12
LATER = (*CHOSEN, start(2, 10))
KNOWN = (FIRST[0].name,)


def chosen(versions: list[Version], asked: Wish, *, has_begun: bool = False) -> Choice:
    return choose(plans_of(versions)[0], asked, has_begun=has_begun)


def iterations(choice: Choice) -> list[int]:
    return [plan.iteration for plan in choice.plans]


def test_auto_is_all_plans_in_their_order() -> None:
    versions = [*versions_of(FIRST, 8, 12), *versions_of(CHOSEN, 9)]
    choice = chosen(versions, wish())
    assert iterations(choice) == [9, 12, 8]
    assert not (choice.follows or choice.prefers_load or choice.ignores_others)


# iter_N

LEFT_12 = [*versions_of(FIRST, 8, 12), *versions_of(CHOSEN, 9, superseded=KNOWN)]


@pytest.mark.parametrize(
    ("versions", "named", "is_restart", "expected"),
    [
        # The first start has that iteration alone, also where an earlier one has named it.
        (versions_of(FIRST, 8, 12), 8, False, [8]),
        ([*versions_of(FIRST, 8), *versions_of(CHOSEN, 9, 10)], 8, False, [8]),
        # Restarts continue what it has done, and never fall to the newer branch that was left.
        ([*versions_of(FIRST, 8), *versions_of(CHOSEN, 9, 10)], 8, True, [10, 9, 8]),
        (LEFT_12, 8, True, [9, 8]),
        ([*versions_of(FIRST, 8, 12), *versions_of(LATER, 11)], 8, True, [11, 8]),
        # Nothing was written since.
        (versions_of(FIRST, 8, 12), 8, True, [8]),
        # The start after is from another named iteration, or has come to this one by itself.
        ([*versions_of(FIRST, 6, 8), *versions_of(CHOSEN, 9)], 6, True, [6]),
        ([*versions_of(FIRST, 8), *versions_of((*FIRST, start(1, 8)), 9)], 8, True, [8]),
    ],
)
def test_iteration_that_is_named_is_gone_back_to_once_and_then_continued(
    versions: list[Version], named: int, is_restart: bool, expected: list[int]
) -> None:
    choice = chosen(versions, wish(f"iter_{named}", is_restart=is_restart))
    assert iterations(choice) == expected
    assert choice.follows == (len(expected) > 1)


# load


@pytest.mark.parametrize(
    ("recover_from", "is_restart", "expected"),
    [
        ("load", False, True),
        ("load", True, False),
        ("auto", False, False),
        ("iter_8", False, False),
    ],
)
def test_everything_is_ignored_by_the_first_start_with_load_only(
    recover_from: str, is_restart: bool, expected: bool
) -> None:
    assert wish(recover_from, is_restart=is_restart).ignores_all == expected


LOADED = (start(3, 2, is_chosen=True), start(4, 3))


def test_restart_after_load_continues_the_run_that_it_began() -> None:
    versions = [*versions_of(FIRST, 12), *versions_of(LOADED, 4)]
    choice = chosen(versions, wish("load", is_restart=True), has_begun=True)
    assert iterations(choice) == [4]
    assert choice.follows


@pytest.mark.parametrize("has_begun", [True, False])
def test_restart_after_load_begins_again_only_where_the_run_has_had_no_state(
    has_begun: bool,
) -> None:
    choice = chosen(versions_of(FIRST, 12), wish("load", is_restart=True), has_begun=has_begun)
    assert (iterations(choice), choice.ignores_others) == ([], not has_begun)


def test_restart_does_not_follow_what_was_chosen_before_its_launcher_came() -> None:
    # An older job has begun with the same flag; this one's first start has left nothing.
    before = frozenset(each.name for each in LOADED)
    versions = [*versions_of(FIRST, 12), *versions_of(LOADED, 4)]
    choice = chosen(versions, wish("load", is_restart=True, known_before=before))
    assert (iterations(choice), choice.ignores_others) == ([], True)


# Weights of another run, and --load


@pytest.mark.parametrize(
    ("began", "described"), [("", "without it"), ("--finetune", "with --finetune")]
)
def test_run_that_began_otherwise_is_refused_with_the_flags_and_both_remedies(
    began: str, described: str
) -> None:
    asked = wish(began_with="--finetune --load=/base")
    with pytest.raises(ConfigError) as refusal:
        chosen(versions_of(FIRST, 12, began_with=began), asked)
    message = str(refusal.value)
    assert re.match("--finetune --load=/base begins a new run", message)
    assert f"began {described}, at iteration 12" in message
    assert "leave the flag out" in message
    assert "--moe-ft-recover-from load" in message


@pytest.mark.parametrize("asked", ["", "--finetune"])
def test_run_that_began_with_the_same_flags_is_continued_with_and_without_them(asked: str) -> None:
    versions = versions_of(FIRST, 12, began_with="--finetune")
    assert iterations(chosen(versions, wish(began_with=asked))) == [12]


@pytest.mark.parametrize(
    ("versions", "loaded", "expected", "prefers_load"),
    [
        (versions_of(FIRST, 8, 12), 13, [], True),
        (versions_of(FIRST, 8, 12), 12, [12], True),
        (versions_of(FIRST, 8, 12), 8, [12, 8], False),
        (LEFT_12, 11, [], True),  # 12 was left
    ],
)
def test_load_comes_before_older_state_of_the_run(
    versions: list[Version], loaded: int, expected: list[int], prefers_load: bool
) -> None:
    choice = chosen(versions, wish(loaded_iteration=loaded))
    assert (iterations(choice), choice.prefers_load) == (expected, prefers_load)


def test_load_that_is_newer_than_all_that_was_found_is_taken_where_nothing_of_that_is_usable() -> (
    None
):
    choice = choose([], wish(loaded_iteration=11), has_begun=False, newest_iteration=10)
    assert choice.prefers_load


@pytest.mark.parametrize("newest", [None, 12])
def test_load_is_not_taken_in_place_of_unusable_state_that_may_be_newer(newest: int | None) -> None:
    asked = wish(loaded_iteration=11)
    assert not choose([], asked, has_begun=False, newest_iteration=newest).prefers_load


# What the user has left


def test_branch_that_was_left_by_choice_is_no_way_out_later() -> None:
    kept, left = without_left(plans_of(LEFT_12)[0], wish())
    assert [plan.iteration for plan in kept] == [9, 8]
    assert [each.iteration for each in left] == [12]
    assert "left when --moe-ft-recover-from named another one" in left[0].reason


def test_branch_that_was_left_is_there_for_who_names_it() -> None:
    kept, left = without_left(plans_of(LEFT_12)[0], wish("iter_12"))
    assert ([plan.iteration for plan in kept], left) == ([9, 12, 8], [])


def test_branch_that_the_choice_knew_nothing_of_is_not_left() -> None:
    other = (*FIRST, start(1, 8, "elsewhere"))
    versions = [*versions_of(FIRST, 8), *versions_of(CHOSEN, 11), *versions_of(other, 10)]
    kept, _ = without_left(plans_of(versions)[0], wish())
    assert [plan.iteration for plan in kept] == [11, 10, 8]


def test_state_that_was_unreadable_for_a_while_is_used_where_nobody_has_left_it() -> None:
    later = (*FIRST, start(1, 8))
    versions = [*versions_of(FIRST, 8, 12), *versions_of(later, 9, superseded=KNOWN)]
    assert len(without_left(plans_of(versions)[0], wish())[0]) == 3
