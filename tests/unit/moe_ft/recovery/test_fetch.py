"""A window is read from wherever each of its versions is intact."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.memory.regions import own_directory
from moe_ft.format.index import Index
from moe_ft.planning.recovery import Source, Tier, plan_recovery
from moe_ft.planning.remains import Place, place_of
from moe_ft.recovery.fetch import Fetched, fetch, read_window
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.readers import MemoryReader, Readers
from moe_ft.state.catalog import UnitCatalog
from moe_ft.units import Level
from tests.unit.moe_ft.builders import WINDOW_UNITS, fill_region, fill_window, make_identity
from tests.unit.moe_ft.recovery.meetings import (
    config_of,
    facts_of,
    initialized,
    leave_window,
    met_alone,
)
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


def test_window_is_read_with_all_of_its_versions(copies: Copies) -> None:
    fetched = copies.fetch()
    assert fetched.missing == ()
    assert {key: bytes(each.content) for key, each in all_fetched(fetched).items()} == {
        key_of(name, entry): content_of(entry) for name, entry in ENTRIES
    }


def test_snapshots_of_a_window_are_those_that_were_taken(copies: Copies) -> None:
    fetched = copies.fetch()
    found = [
        tuple(sorted(str(each.unit) for each in units) for units in fetched.snapshot(position))
        for position in range(3)
    ]
    assert found == [
        (sorted(NAMES[:2]), sorted(NAMES[2:])),
        ([NAMES[2]], [EMBEDDING]),
        ([EMBEDDING], []),
    ]


def test_best_source_is_read_and_no_other_where_it_is_intact(copies: Copies) -> None:
    shutil.rmtree(copies.regions[1].directory)
    fetched = copies.fetch()
    assert fetched.missing == ()
    assert copies.readers.problems == []


@pytest.mark.parametrize("number", range(len(ENTRIES)))
def test_version_that_is_corrupt_comes_from_the_next_source_and_the_others_from_the_best(
    copies: Copies, number: int
) -> None:
    name, entry = ENTRIES[number]
    copies.spoil(0, entry)
    fetched = copies.fetch()
    assert fetched.missing == ()
    for key, each in all_fetched(fetched).items():
        expected = copies.sources[1 if key == key_of(name, entry) else 0]
        assert each.source is expected
    assert f"unit {name} does not match its checksum" in copies.readers.problems[0]


@pytest.mark.parametrize("number", range(len(ENTRIES)))
def test_version_that_is_intact_nowhere_is_missing_by_its_name(copies: Copies, number: int) -> None:
    for copy in (0, 1):
        copies.spoil(copy, ENTRIES[number][1])
    assert set(copies.fetch().missing) == missing_of([ENTRIES[number]])


@settings(max_examples=30)
@given(
    st.lists(
        st.sets(st.integers(0, len(ENTRIES) - 1), max_size=len(ENTRIES)), min_size=1, max_size=3
    )
)
def test_window_is_put_together_from_whatever_is_intact_in_any_source(
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
            (entry,) = [
                entry
                for other, entry in ENTRIES
                if key_of(other, entry) == (name, level, iteration)
            ]
            assert each.content == content_of(entry)


def test_source_that_vanished_is_passed_over_and_said(copies: Copies) -> None:
    copies.regions[0].index_path.unlink()
    fetched = copies.fetch()
    assert fetched.missing == ()
    assert {each.source for each in all_fetched(fetched).values()} == {copies.sources[1]}
    assert "No such file" in copies.readers.problems[0]


def test_source_that_holds_another_window_by_now_is_passed_over(copies: Copies) -> None:
    fill_window(copies.regions[0].directory, first_iteration=6)
    fetched = copies.fetch()
    assert fetched.missing == ()
    assert "it now holds iteration 8 of rank 0, not what was planned" in copies.readers.problems[0]


def test_source_that_holds_less_of_its_window_by_now_is_passed_over(copies: Copies) -> None:
    # The same iteration, of the same start, as a single snapshot: not what the plan was made for.
    fill_region(copies.regions[0].directory, iteration=7)
    fetched = copies.fetch()
    assert fetched.missing == ()
    assert len(fetched.compute) == 3


def test_window_that_no_source_has_any_more_is_nothing(copies: Copies) -> None:
    for region in copies.regions:
        region.index_path.unlink()
    fetched = copies.fetch()
    assert fetched.index is None
    assert (fetched.units, fetched.compute) == ({}, ())
    assert len(copies.readers.problems) == 2


def at_another_iteration(index: Index) -> dict[str, object]:
    unit = msgspec.structs.replace(index.compute[0][EMBEDDING], iteration=6)
    first = {**index.compute[0], EMBEDDING: unit}
    return {"compute": (first, *index.compute[1:])}


def at_the_other_level(index: Index) -> dict[str, object]:
    unit = msgspec.structs.replace(index.compute[0][EMBEDDING], level="full")
    first = {**index.compute[0], EMBEDDING: unit}
    return {"compute": (first, *index.compute[1:])}


def without_weights(index: Index) -> dict[str, object]:
    first = {name: unit for name, unit in index.compute[0].items() if name != EMBEDDING}
    return {"compute": (first, *index.compute[1:])}


def cut_differently(index: Index) -> dict[str, object]:
    unit = index.compute[0][EMBEDDING]
    shorter = msgspec.structs.replace(unit.tensors[0], end=NUM_ELEMENTS - 1)
    unit = msgspec.structs.replace(unit, tensors=(shorter,))
    return {"compute": ({**index.compute[0], EMBEDDING: unit}, *index.compute[1:])}


SPOIL_INDEX = pytest.mark.parametrize(
    "spoil", [at_another_iteration, at_the_other_level, without_weights, cut_differently]
)


@SPOIL_INDEX
def test_weights_that_an_index_describes_wrongly_come_from_the_next_source(
    copies: Copies, spoil: object
) -> None:
    copies.change_index(0, **spoil(WINDOW.index))  # type: ignore[operator]
    fetched = copies.fetch()
    assert fetched.missing == ()
    assert fetched.compute[0][EMBEDDING].source is copies.sources[1]
    assert fetched.compute[1][EMBEDDING].source is copies.sources[0]


@SPOIL_INDEX
def test_weights_that_all_indexes_describe_wrongly_are_missing(
    copies: Copies, spoil: object
) -> None:
    for number in (0, 1):
        copies.change_index(number, **spoil(WINDOW.index))  # type: ignore[operator]
    assert copies.fetch().missing == ("weights of embedding at iteration 5",)


def test_window_up_to_now_with_a_unit_that_was_never_saved_lacks_it(copies: Copies) -> None:
    units = {name: unit for name, unit in WINDOW.index.units.items() if name != EMBEDDING}
    for number in (0, 1):
        copies.change_index(number, units=units)
    assert copies.fetch().missing == (EMBEDDING,)


def test_unit_of_which_another_rank_saves_everything_is_not_looked_for(copies: Copies) -> None:
    catalog = make_catalog()
    nothing = [
        replace(local, start=0, end=0, master=None) if str(local.unit) == EMBEDDING else local
        for local in catalog.parameters
    ]
    units = {name: unit for name, unit in WINDOW.index.units.items() if name != EMBEDDING}
    compute = tuple(
        {name: unit for name, unit in each.items() if name != EMBEDDING}
        for each in WINDOW.index.compute
    )
    for number in (0, 1):
        copies.change_index(number, units=units, compute=compute)
    fetched = copies.fetch(UnitCatalog(nothing, leaves_out_frozen=False))
    assert fetched.missing == ()
    assert EMBEDDING not in fetched.units


def test_single_snapshot_has_no_weights_and_one_position(tmp_path: Path) -> None:
    fill_window(own_directory(tmp_path, 0), length=1)
    (version,) = look_at_memory(tmp_path, "node-a", "job").versions
    readers = Readers(lambda source: MemoryReader(tmp_path / source.version.path))
    source = Source(tier=Tier.MEMORY, version=version)
    fetched = read_window([source], WINDOW_UNITS, make_catalog(), readers)
    assert fetched.compute == []
    full, compute = fetched.snapshot(0)
    assert sorted(str(each.unit) for each in full) == sorted(NAMES)
    assert compute == []


def test_units_of_older_snapshots_are_in_place_at_once_also_if_their_window_is_gone(
    copies: Copies,
) -> None:
    name, unit = next(iter(copies.fetch().units.items()))
    alone = Fetched(units={name: unit})
    assert alone.snapshot(0) == ([unit], [])
    assert len(alone.slices(make_catalog())) == 1


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


def test_slices_of_what_the_distributed_optimizer_divided_are_nobodys_business(
    copies: Copies,
) -> None:
    catalog = make_catalog()
    assert copies.fetch(catalog).slices(catalog) == [({}, {})] * 3


def test_units_are_counted_once_by_the_tier_of_their_version_at_full(copies: Copies) -> None:
    assert copies.fetch().sources == {Tier.MEMORY: len(WINDOW_UNITS)}


def test_places_of_a_state_are_unreadable_if_some_of_it_is_damaged(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    index = leave_window(config)
    with initialized(), ExitStack() as opened:
        met = met_alone(config, facts_of(), opened)
        directory = met.site.node_dir
        (version,) = look_at_memory(directory, "node", "job").versions
        (plan,), _ = plan_recovery([version], ["node"])

        def unreadable() -> frozenset[Place]:
            readers = Readers(lambda source: MemoryReader(directory / source.version.path))
            return fetch(plan, met, readers, {}, None).unreadable

        assert unreadable() == frozenset()
        with (directory / version.path).with_name(index.file).open("r+b") as file:
            file.seek(index.units[EMBEDDING].offset)
            file.write(b"\xff")
        assert unreadable() == {place_of(version)}
        (directory / version.path).unlink()
        assert unreadable() == {place_of(version)}


def test_unit_of_another_run_is_not_what_was_planned(copies: Copies) -> None:
    other = make_identity("run-b")
    fill_window(copies.regions[0].directory, identity=other)
    fetched = copies.fetch()
    assert {each.source for each in all_fetched(fetched).values()} == {copies.sources[1]}
