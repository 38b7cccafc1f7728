"""All ranks that save a part of an expert put back the same version: the newest that is intact everywhere."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.regions import UnitPool
from moe_ft.format.encoding import encode
from moe_ft.format.entries import ParameterEntry
from moe_ft.format.identity import Identity
from moe_ft.planning.recovery import Source, Version
from moe_ft.planning.tiers import MEMORY
from moe_ft.recovery.agree import _LOST
from moe_ft.recovery.fetch import Fetching
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.left import Copy
from moe_ft.recovery.readers import MemoryReader, Readers
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.interface import Rotation
from tests.unit.moe_ft.builders import fill_region, make_identity, put_in_slot, rotating_unit
from tests.unit.moe_ft.together import run_together

UNITS = [rotating_unit(expert) for expert in range(2)]
NAMES = [str(unit) for unit in UNITS]
ORIGINS = dict.fromkeys(NAMES, "0" * 16)


def catalog() -> UnitCatalog:
    """Return the units of a rank that has one tensor of each."""
    found = []
    for unit in UNITS:
        live = torch.nn.Parameter(torch.zeros(33))
        found.append(
            LocalParameter(
                unit=unit,
                name=f"{unit}.weight",
                entry=ParameterEntry(shape=(33,)),
                parameter=live,
                start=0,
                end=33,
                optimizer=None,
                master=None,
                is_sharded=True,
                is_expert=True,
            )
        )
    return UnitCatalog(found, leaves_out_frozen=False)


class Rank:
    """A rank with the versions that it has left, and those that it has read."""

    def __init__(self, tmp_path: Path, number: int = 0) -> None:
        self.node_dir, self.number = tmp_path, number
        self.directory = own_directory(tmp_path, number)
        self.pool = UnitPool(self.directory, 4 * 33, 20)
        self.pool.open()
        self.sources: list[Source] = []
        self.readers = Readers(lambda source: MemoryReader(tmp_path / source.version.path))
        self._slot = 0

    def save(
        self, iteration: int, versions: dict[int, int], identity: Identity | None = None
    ) -> None:
        """Have an index of an iteration that names experts' versions, by their iterations."""
        identity = identity or make_identity()
        region, index = fill_region(
            self.directory,
            len(self.sources),
            rank=self.number,
            iteration=iteration,
            identity=identity,
        )
        units = {}
        for expert, at in versions.items():
            name, unit = put_in_slot(self.pool, self._slot, expert, iteration=at)
            tensors = (msgspec.structs.replace(unit.tensors[0], key="weight"),)
            incarnation = identity.history[-1][0]
            units[name] = msgspec.structs.replace(unit, tensors=tensors, incarnation=incarnation)
            self._slot += 1
        index = msgspec.structs.replace(index, units={**index.units, **units}, origins=ORIGINS)
        region.commit(encode(index), iteration)
        version = Version(
            rank=self.number,
            iteration=iteration,
            lineage=identity.lineage,
            history=identity.history,
            node="a",
            path=str(region.index_path.relative_to(self.node_dir)),
        )
        self.sources.insert(0, Source(tier=MEMORY, version=version))

    def spoil(self, slot: int) -> None:
        """Flip a bit of a version."""
        self.pool.mapping[self.pool.offset_of(slot)] ^= 0x40

    def fetch(
        self,
        gather: Callable[[Any, Any], list[Any]] = lambda value, _: [value],
        origins: dict[str, str] | None = None,
        most_iteration: int | None = None,
        wanted: tuple[int, int] = (0, 99),
    ) -> Fetched:
        """Agree with other ranks, and read; again without what some rank cannot read."""
        met: Any = SimpleNamespace(
            site=SimpleNamespace(rank=self.number),
            strategy=SimpleNamespace(
                always=(), rotation=Rotation(units=frozenset(UNITS), is_empty=False)
            ),
            live=SimpleNamespace(catalog=catalog()),
            ranks=SimpleNamespace(stage=SimpleNamespace(gather=gather)),
        )
        found: Any = SimpleNamespace(
            sources_of=lambda rank: [
                each
                for each in self.sources
                if most_iteration is None or each.version.iteration <= most_iteration
            ][:1],
            elsewhere={self.number: self.sources},
            is_other_layout=False,
            is_local=False,
            start=SimpleNamespace(number=wanted[0]),
            iteration=wanted[1],
        )
        known = ORIGINS if origins is None else origins
        fetching = Fetching(found, met, self.readers, known, most_iteration)
        while True:
            fetched = fetching.fetch()
            if not fetching.leave_out(frozenset[Copy]().union(*gather(fetched.lost, _LOST))):
                return fetched


def fetch_all(ranks: Sequence[Rank]) -> list[Fetched]:
    """Have all ranks agree."""
    return run_together(len(ranks), lambda number, gather: ranks[number].fetch(gather))


def iterations(state: Fetched) -> dict[str, int]:
    return {name: version.iteration for name, version in state.rotation.versions.items()}


def read_iterations(state: Fetched) -> dict[str, int]:
    return {name: unit.entry.iteration for name, unit in state.units.items()}


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_newest_version_of_each_expert_is_read(rank: Rank) -> None:
    rank.save(4, {0: 3, 1: 4})
    rank.save(5, {0: 5, 1: 4})
    state = rank.fetch()
    assert iterations(state) == read_iterations(state) == {NAMES[0]: 5, NAMES[1]: 4}
    assert (state.rotation.kept, state.missing) == (frozenset(), ())


def test_expert_that_was_never_saved_is_missing_after_a_start_from_another_state(
    rank: Rank,
) -> None:
    rank.save(5, {0: 5})
    state = rank.fetch(origins=dict.fromkeys(NAMES, "f" * 16))
    assert (state.rotation.kept, state.missing) == (frozenset(), (NAMES[1],))


def test_version_beyond_the_iteration_that_was_asked_for_is_not_used(rank: Rank) -> None:
    rank.save(4, {0: 3, 1: 4})
    rank.save(6, {0: 6, 1: 4})
    assert iterations(rank.fetch(most_iteration=5)) == {NAMES[0]: 3, NAMES[1]: 4}


@pytest.mark.parametrize(("start", "expected"), [(0, 5), (1, 6)])
def test_version_of_the_recovered_iteration_is_preferred_if_the_same_start_saved_it(
    rank: Rank, start: int, expected: int
) -> None:
    rank.save(5, {0: 5, 1: 4})
    rank.save(6, {0: 6, 1: 4})
    found = iterations(rank.fetch(wanted=(start, 5)))
    assert found == {NAMES[0]: expected, NAMES[1]: 4}


def test_version_of_a_later_incarnation_is_preferred_to_one_of_a_later_iteration(
    rank: Rank,
) -> None:
    rank.save(7, {0: 7, 1: 7})
    rank.save(6, {0: 6}, make_identity(history=((0, 0), (1, 5))))
    assert iterations(rank.fetch()) == {NAMES[0]: 6, NAMES[1]: 7}


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 1)), st.sampled_from([(), (0,), (1,), (0, 1)]), st.booleans()
        ),
        max_size=4,
    )
)
@settings(max_examples=25)
def test_ranks_agree_on_the_newest_version_that_is_intact_on_all_of_them(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[set[int], tuple[int, ...], bool]],
) -> None:
    tmp_path = tmp_path_factory.mktemp("node")
    ranks = [Rank(tmp_path, 0), Rank(tmp_path, 1)]
    expected: dict[str, int] = {}
    for each in ranks:
        each.save(0, {})
    for iteration, (experts, on_ranks, is_spoiled) in enumerate(history, 1):
        versions = dict.fromkeys(sorted(experts), iteration)
        for number in on_ranks:
            first = ranks[number]._slot
            ranks[number].save(iteration, versions)
            for slot in range(first, ranks[number]._slot):
                if is_spoiled and number == 1:
                    ranks[number].spoil(slot)
        if len(on_ranks) == 2 and not is_spoiled:
            expected.update({NAMES[expert]: iteration for expert in experts})
    states = fetch_all(ranks)
    for state in states:
        assert iterations(state) == read_iterations(state) == expected
        assert state.rotation.kept == set(NAMES) - set(expected)
