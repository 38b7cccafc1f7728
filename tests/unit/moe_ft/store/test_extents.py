"""The store against models: what is kept never changes, what went is not named, targets have their base."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moe_ft.errors import SnapshotError
from moe_ft.store.extents import Extent, Reason, SizeClass, Store, TargetVersions

WINDOW, UNIT = SizeClass.WINDOW, SizeClass.UNIT


@dataclass
class Written:
    """An index on the file system: what its extents held when it was written."""

    contents: dict[Extent, int]


@dataclass
class Taking:
    """A window under way."""

    home: Extent
    slots: list[Extent]
    carried: frozenset[Extent] = field(default_factory=frozenset)

    @property
    def names(self) -> frozenset[Extent]:
        return self.carried | {self.home, *self.slots}


class Machine(RuleBasedStateMachine):
    """A rank that takes windows with units, has them written, recovers, and is given up at any moment."""

    @initialize(num_windows=st.integers(2, 4), num_units=st.integers(0, 4), k=st.integers(0, 3))
    def begin(self, num_windows: int, num_units: int, k: int) -> None:
        self.k = min(k, num_units)
        self.store = Store({WINDOW: num_windows, UNIT: num_units + 2 * self.k}, self.remove)
        self.contents: dict[Extent, int] = {}
        self.indexes: dict[Extent, Written] = {}
        self.newest: dict[int, Extent] = {}  # unit -> extent
        self.num_units, self.clock = num_units, 0
        self.taking: Taking | None = None
        self.units: list[int] = []
        self.promised: dict[Reason, dict[Extent, int]] = {}

    def remove(self, home: Extent) -> None:
        self.indexes.pop(home, None)

    def write(self, extent: Extent) -> None:
        self.clock += 1
        self.contents[extent] = self.clock

    def keep(self, reason: Reason, extents: frozenset[Extent]) -> None:
        self.promised[reason] = {each: self.contents.get(each, 0) for each in extents}
        self.store.keep(reason, extents)

    @property
    def has_room(self) -> bool:
        upcoming = self.taking.names if self.taking else frozenset[Extent]()
        windows = self.store.has_room(WINDOW, 1, upcoming)
        return windows and self.store.has_room(UNIT, self.k, upcoming)

    @precondition(lambda self: self.taking is None and self.has_room)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        units = range(self.num_units)
        self.units = sorted(
            data.draw(st.sets(st.sampled_from(units), max_size=self.k)) if units else []
        )
        (home,) = self.store.take(WINDOW)
        slots = self.store.take(UNIT, len(self.units))
        carried = frozenset(slot for unit, slot in self.newest.items() if unit not in self.units)
        self.taking = Taking(home, slots, carried)
        for each in (home, *slots):
            self.write(each)

    @precondition(lambda self: self.taking is not None)
    @rule(is_committed=st.booleans(), is_complete=st.booleans())
    def settle(self, is_committed: bool, is_complete: bool) -> None:
        taking, self.taking = self.taking, None
        assert taking is not None
        had_room = self.store.has_room(WINDOW, 1, taking.names)
        had_slots = self.store.has_room(UNIT, self.k, taking.names)
        if is_committed:
            names = {each: self.contents[each] for each in taking.names}
            self.indexes[taking.home] = Written(names)
            self.store.commit(taking.home, taking.names)
        self.store.give_up(self.store.filling)
        if is_committed and is_complete:
            self.newest |= dict(zip(self.units, taking.slots, strict=True))
            self.keep(Reason.COMPLETE, taking.names)
            self.keep(Reason.RECOVERED, frozenset())
        assert not had_room or self.store.free(WINDOW)
        assert not had_slots or len(self.store.free(UNIT)) >= self.k

    @precondition(lambda self: self.promised.get(Reason.COMPLETE))
    @rule(data=st.data())
    def persist(self, data: st.DataObject) -> None:
        complete = self.promised[Reason.COMPLETE]
        slots = [each for each in complete if each.size_class is UNIT]
        chosen = data.draw(st.sets(st.sampled_from(slots), max_size=self.k)) if slots else set()
        homes = {each for each in complete if each.size_class is WINDOW}
        self.keep(Reason.PERSISTING, frozenset(homes | chosen))

    @rule()
    def end_persisting(self) -> None:
        self.keep(Reason.PERSISTING, frozenset())

    @precondition(lambda self: self.taking is None and not self.promised.get(Reason.COMPLETE))
    @rule()
    def recover(self) -> None:
        """Keep the newest index, of which only some units are wanted."""
        if self.indexes:
            home = next(reversed(self.indexes))
            self.keep(Reason.RECOVERED, frozenset({home}))

    @invariant()
    def what_is_kept_is_as_it_was(self) -> None:
        for promised in getattr(self, "promised", {}).values():
            for extent, content in promised.items():
                assert self.contents.get(extent, 0) == content

    @invariant()
    def no_index_names_what_was_overwritten(self) -> None:
        kept: set[Extent] = set().union(*getattr(self, "promised", {}).values())
        for home, index in getattr(self, "indexes", {}).items():
            is_true = all(self.contents[each] == was for each, was in index.contents.items())
            assert is_true or home in kept


Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestStore: Any = Machine.TestCase


def extents(size_class: SizeClass, *numbers: int) -> list[Extent]:
    return [Extent(size_class, number) for number in numbers]


def test_what_no_index_names_is_filled_first_then_what_the_oldest_names() -> None:
    store = Store({UNIT: 4})
    first, second, third, fourth = extents(UNIT, 0, 1, 2, 3)
    store.commit(third)
    store.commit(first)
    assert store.free(UNIT) == [second, fourth, third, first]
    assert store.take(UNIT, 3) == [second, fourth, third]


def test_too_few_free_extents_are_refused_with_their_number() -> None:
    store = Store({UNIT: 4})
    store.keep(Reason.PERSISTING, extents(UNIT, 0, 2))
    with pytest.raises(SnapshotError, match="3 extents of the class unit are needed, 2 of 4"):
        store.take(UNIT, 3)


def test_index_whose_home_is_kept_goes_when_nothing_keeps_that_any_longer() -> None:
    removed: list[Extent] = []
    store = Store({WINDOW: 2, UNIT: 2}, removed.append)
    home, slots = Extent(WINDOW, 0), extents(UNIT, 0, 1)
    store.commit(home, slots)
    store.keep(Reason.PERSISTING, [home, slots[0]])
    assert store.take(UNIT) == [slots[1]]
    assert removed == []
    store.keep(Reason.PERSISTING, [])
    assert removed == [home]


class Targets(RuleBasedStateMachine):
    """A sender of units, and targets that get what they lack, fail to, or lose all that they have."""

    @initialize()
    def begin(self) -> None:
        self.versions: TargetVersions[int, str, int] = TargetVersions()
        self.held: dict[int, dict[str, int]] = {0: {}, 1: {}}
        self.own: dict[str, int] = {}

    @rule(units=st.sets(st.sampled_from("abcd")), version=st.integers(0, 3))
    def save(self, units: set[str], version: int) -> None:
        self.own |= dict.fromkeys(units, version)

    @rule(gone=st.sampled_from("abcd"))
    def leave_out(self, gone: str) -> None:
        self.own.pop(gone, None)

    @rule(peer=st.integers(0, 1), arrives=st.booleans())
    def send(self, peer: int, arrives: bool) -> None:
        sent = self.versions.lacking(peer, self.own)
        if not arrives:  # in part
            self.held[peer] |= {unit: self.own[unit] for unit in sent[:1]}
            self.versions.forget(peer)
            return
        here = self.held[peer] | {unit: self.own[unit] for unit in sent}
        self.held[peer] = {unit: here[unit] for unit in self.own}  # others are overwritten
        self.versions.note(peer, self.own)
        assert self.held[peer] == self.own
        assert not self.versions.lacking(peer, self.own)

    @rule(peer=st.integers(0, 1))
    def lose(self, peer: int) -> None:
        self.held[peer].clear()
        self.versions.forget(peer)


Targets.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestVersions: Any = Targets.TestCase
