"""A window is read from wherever each of its versions is intact."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.units import Level
from tests.unit.moe_ft.builders import fill_window
from tests.unit.moe_ft.recovery.window_copies import (
    EMBEDDING,
    ENTRIES,
    NAMES,
    NUM_ELEMENTS,
    WINDOW,
    Copies,
    all_fetched,
    content_of,
    key_of,
    make_catalog,
    missing_of,
)


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path)


@settings(max_examples=30)
@given(
    st.lists(
        st.sets(st.integers(0, len(ENTRIES) - 1), max_size=len(ENTRIES)), min_size=1, max_size=3
    )
)
def test_window_is_put_together_from_the_best_source_in_which_each_version_is_intact(
    spoiled: list[set[int]],
) -> None:
    with TemporaryDirectory() as directory:
        copies = Copies(Path(directory), len(spoiled))
        for copy, numbers in enumerate(spoiled):
            for number in numbers:
                copies.spoil(copy, ENTRIES[number][1])
        lost = [ENTRIES[number] for number in set.intersection(*spoiled)]
        lost_names = {name for name, entry in lost if entry.level == Level.FULL}
        fetched = copies.fetch()
        # Of a unit without its version at FULL nothing else is of use.
        expected = [each for each in lost if each[0] not in lost_names or each[1].level == "full"]
        assert set(fetched.missing) == missing_of(expected)
        for (name, level, iteration), each in all_fetched(fetched).items():
            ((number, entry),) = [
                (number, entry)
                for number, (other, entry) in enumerate(ENTRIES)
                if key_of(other, entry) == (name, level, iteration)
            ]
            assert each.content == content_of(entry)
            best = next(copy for copy, numbers in enumerate(spoiled) if number not in numbers)
            assert each.source is copies.sources[best]


def test_source_that_holds_another_window_by_now_is_passed_over(copies: Copies) -> None:
    fill_window(copies.regions[0].directory, first_iteration=6)
    fetched = copies.fetch()
    assert fetched.missing == ()
    assert "it now holds iteration 8 of rank 0, not what was planned" in copies.readers.problems[0]


def test_window_up_to_now_with_a_unit_that_was_never_saved_lacks_it(copies: Copies) -> None:
    units = {name: unit for name, unit in WINDOW.index.units.items() if name != EMBEDDING}
    for number in (0, 1):
        copies.change_index(number, units=units)
    assert copies.fetch().missing == (EMBEDDING,)


def test_slices_of_what_ranks_hold_alike_are_listed_by_snapshot_and_level(copies: Copies) -> None:
    catalog = make_catalog(is_sharded=False)
    slices = copies.fetch(catalog).slices(catalog)
    names = [f"{name}.weight" for name in NAMES]
    whole = (0, NUM_ELEMENTS)
    assert [(dict(full), dict(compute)) for full, compute in slices] == [
        (dict.fromkeys(names[:2], whole), dict.fromkeys(names[2:], whole)),
        (dict.fromkeys(names[2:3], whole), dict.fromkeys(names[3:], whole)),
        (dict.fromkeys(names[3:], whole), {}),
    ]
