"""A window is read from wherever each of its versions is intact, and put back bit for bit."""

import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.regions import own_directory, replica_directory
from moe_ft.faults import Phase
from moe_ft.format.encoding import encode
from moe_ft.format.entries import UnitEntry, tensor_bytes
from moe_ft.format.index import Index
from moe_ft.planning.recovery import Source, Tier
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.restore import FetchedState, FetchedUnit, Readers, fetch, put_back
from moe_ft.recovery.sources import MemoryReader
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import Level
from tests.unit.moe_ft.builders import (
    WINDOW_UNITS,
    fill_region,
    fill_window,
    make_identity,
    make_optimizer,
    make_parameter,
    make_window,
)

NUM_ELEMENTS = 33
WINDOW = make_window()
ENTRIES = list(WINDOW.index.entries())
NAMES = [str(unit) for unit in WINDOW_UNITS]
EMBEDDING = "embedding"


def make_parameters(*, is_sharded: bool = True) -> list[LocalParameter]:
    """Return the parameters of `make_window`, as a start has them: all zero and without moments."""
    found = []
    for unit in WINDOW_UNITS:
        master = torch.zeros(NUM_ELEMENTS)
        found.append(
            make_parameter(
                unit,
                parameter=torch.zeros(NUM_ELEMENTS, dtype=torch.bfloat16),
                optimizer=make_optimizer(master, kind="lion"),  # which has one moment
                master=master,
                is_sharded=is_sharded,
            )
        )
    return found


def make_catalog(*, is_sharded: bool = True) -> UnitCatalog:
    return UnitCatalog(make_parameters(is_sharded=is_sharded), leaves_out_frozen=False)


class Copies:
    """Copies of a window in several places of one node's memory, best first."""

    def __init__(self, node_dir: Path, count: int = 2) -> None:
        self.node_dir = node_dir
        holders = [own_directory(node_dir, 0)]
        holders += [replica_directory(node_dir, 0, 9 + number) for number in range(count - 1)]
        self.regions = [fill_window(directory)[0] for directory in holders]
        found = {
            version.path: version for version in look_at_memory(node_dir, "node-a", "job").versions
        }
        paths = [str(region.index_path.relative_to(node_dir)) for region in self.regions]
        self.sources = [Source(tier=Tier.MEMORY, version=found[path]) for path in paths]
        self.readers = Readers(lambda source: MemoryReader(node_dir / source.version.path))

    def spoil(self, number: int, entry: UnitEntry) -> None:
        """Flip a bit of a version in a copy."""
        self.regions[number].mapping[entry.offset + entry.num_bytes - 1] ^= 0x40

    def change_index(self, number: int, **changes: object) -> None:
        """Have a copy with another index."""
        index = msgspec.structs.replace(
            WINDOW.index, file=self.regions[number].data_path.name, **changes
        )
        self.regions[number].commit(encode(index), index.iteration)

    def fetch(self, catalog: UnitCatalog | None = None) -> FetchedState:
        """Read the window."""
        return fetch(self.sources, WINDOW_UNITS, catalog or make_catalog(), self.readers)


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path)


def all_fetched(fetched: FetchedState) -> dict[tuple[str, str, int], FetchedUnit]:
    """Return every version that was read by name, level and iteration."""
    found = [*fetched.units.items()]
    found += [item for units in fetched.compute for item in units.items()]
    return {(name, each.entry.level, each.entry.iteration): each for name, each in found}


def key_of(name: str, entry: UnitEntry) -> tuple[str, str, int]:
    return name, entry.level, entry.iteration


def content_of(entry: UnitEntry) -> bytes:
    return WINDOW.content[entry.offset : entry.offset + entry.num_bytes]


def missing_of(entries: Collection[tuple[str, UnitEntry]]) -> set[str]:
    """Return how versions are called that no source has."""
    return {
        name if entry.level == Level.FULL else f"weights of {name} at iteration {entry.iteration}"
        for name, entry in entries
    }


# Reading


def test_window_is_read_with_all_of_its_versions(copies: Copies) -> None:
    fetched = copies.fetch()
    assert fetched.missing == []
    assert {key: bytes(each.content) for key, each in all_fetched(fetched).items()} == {
        key_of(name, entry): content_of(entry) for name, entry in ENTRIES
    }


def test_snapshots_of_a_window_are_those_that_were_taken(copies: Copies) -> None:
    fetched = copies.fetch()
    assert fetched.first_iteration == 5
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
    assert fetched.missing == []
    assert copies.readers.problems == []


@pytest.mark.parametrize("number", range(len(ENTRIES)))
def test_version_that_is_corrupt_comes_from_the_next_source_and_the_others_from_the_best(
    copies: Copies, number: int
) -> None:
    name, entry = ENTRIES[number]
    copies.spoil(0, entry)
    fetched = copies.fetch()
    assert fetched.missing == []
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
    assert fetched.missing == []
    assert {each.source for each in all_fetched(fetched).values()} == {copies.sources[1]}
    assert "No such file" in copies.readers.problems[0]


def test_source_that_holds_another_window_by_now_is_passed_over(copies: Copies) -> None:
    fill_window(copies.regions[0].directory, first_iteration=6)
    fetched = copies.fetch()
    assert fetched.missing == []
    assert "it now holds iteration 8 of rank 0, not what was planned" in copies.readers.problems[0]


def test_source_that_holds_less_of_its_window_by_now_is_passed_over(copies: Copies) -> None:
    # The same iteration, of the same start, as a single snapshot: not what the plan was made for.
    fill_region(copies.regions[0].directory, iteration=7)
    fetched = copies.fetch()
    assert fetched.missing == []
    assert len(fetched.compute) == 3


def test_window_that_no_source_has_any_more_is_nothing(copies: Copies) -> None:
    for region in copies.regions:
        region.index_path.unlink()
    fetched = copies.fetch()
    assert fetched.index is None
    assert (fetched.units, fetched.compute) == ({}, [])
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
    assert fetched.missing == []
    assert fetched.compute[0][EMBEDDING].source is copies.sources[1]
    assert fetched.compute[1][EMBEDDING].source is copies.sources[0]


@SPOIL_INDEX
def test_weights_that_all_indexes_describe_wrongly_are_missing(
    copies: Copies, spoil: object
) -> None:
    for number in (0, 1):
        copies.change_index(number, **spoil(WINDOW.index))  # type: ignore[operator]
    assert copies.fetch().missing == ["weights of embedding at iteration 5"]


def test_window_up_to_now_with_a_unit_that_was_never_saved_lacks_it(copies: Copies) -> None:
    units = {name: unit for name, unit in WINDOW.index.units.items() if name != EMBEDDING}
    for number in (0, 1):
        copies.change_index(number, units=units)
    assert copies.fetch().missing == [EMBEDDING]


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
    assert fetched.missing == []
    assert EMBEDDING not in fetched.units


def test_single_snapshot_has_no_weights_and_one_position(tmp_path: Path) -> None:
    fill_window(own_directory(tmp_path, 0), length=1)
    (version,) = look_at_memory(tmp_path, "node-a", "job").versions
    readers = Readers(lambda source: MemoryReader(tmp_path / source.version.path))
    source = Source(tier=Tier.MEMORY, version=version)
    fetched = fetch([source], WINDOW_UNITS, make_catalog(), readers)
    assert fetched.compute == []
    full, compute = fetched.snapshot(0)
    assert sorted(str(each.unit) for each in full) == sorted(NAMES)
    assert compute == []


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


# Putting back


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def saved(entry: UnitEntry, key: str) -> bytes:
    """Return the bytes of a tensor of a version."""
    (tensor,) = [each for each in entry.tensors if each.key == key]
    start = entry.offset + tensor.offset
    return WINDOW.content[start : start + tensor_bytes(tensor)]


def no_fault(phase: Phase, iteration: int) -> None:
    """Inflict nothing."""


@pytest.mark.parametrize("position", [0, 1, 2])
def test_masters_moments_and_weights_of_a_snapshot_are_put_back_and_nothing_else(
    copies: Copies, position: int
) -> None:
    catalog = make_catalog()
    full, compute = copies.fetch(catalog).snapshot(position)
    put_back([*full, *compute], catalog, 5 + position, no_fault)
    is_full = {str(each.unit) for each in full}
    is_compute = {str(each.unit) for each in compute}
    for local in catalog.parameters:
        name, state = str(local.unit), local.optimizer.optimizer.state
        assert local.master is not None
        if name in is_full:
            entry = WINDOW.index.units[name]
            assert bytes_of(local.master) == saved(entry, "param")
            assert bytes_of(state[local.master]["exp_avg"]) == saved(entry, "exp_avg")
        else:
            assert not local.master.any()
            assert local.master not in state
        if name in is_compute:
            entry = WINDOW.index.compute[position][name]
            assert bytes_of(local.parameter) == saved(entry, "weight")
        else:
            assert not local.parameter.any()


def test_moments_that_did_not_exist_are_removed(copies: Copies) -> None:
    catalog = make_catalog()
    unit = WINDOW.index.units[EMBEDDING]
    tensors = tuple(
        msgspec.structs.replace(each, is_absent=each.key != "param") for each in unit.tensors
    )
    units = {**WINDOW.index.units, EMBEDDING: msgspec.structs.replace(unit, tensors=tensors)}
    copies.change_index(0, units=units)
    (local,) = [each for each in catalog.parameters if str(each.unit) == EMBEDDING]
    local.optimizer.optimizer.state[local.master]["exp_avg"] = torch.ones(NUM_ELEMENTS)
    full, _ = copies.fetch(catalog).snapshot(2)
    put_back(full, catalog, 7, None)
    assert local.master not in local.optimizer.optimizer.state


def test_fault_may_be_inflicted_when_half_of_the_units_are_back(copies: Copies) -> None:
    catalog, found = make_catalog(), []

    def hook(phase: Phase, iteration: int) -> None:
        masters = [local.master for local in catalog.parameters if local.master is not None]
        found.append((phase, iteration, sum(bool(each.any()) for each in masters)))

    full, _ = copies.fetch(catalog).snapshot(0)
    put_back(full, catalog, 5, hook)
    assert found == [(Phase.RECOVERY, 5, 1)]


def test_unit_of_another_run_is_not_what_was_planned(copies: Copies) -> None:
    other = make_identity("run-b")
    fill_window(copies.regions[0].directory, identity=other)
    fetched = copies.fetch()
    assert {each.source for each in all_fetched(fetched).values()} == {copies.sources[1]}
