"""State that ranks have left, as one rank sees it: copies of units, and where they are.

In the same layout only what a rank of the same number has left counts. Of another layout every rank may need
something of all ranks. recovery/transfer.py reads what a plan takes from here.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from moe_ft.format.entries import ParameterEntry, UnitEntry
from moe_ft.format.index import Index
from moe_ft.format.records import Gaps
from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.planning.recovery import Source
from moe_ft.planning.relayout import VersionNumber
from moe_ft.recovery.readers import Readers

Position = int | None  # number of the snapshot that has a unit at COMPUTE; None for FULL


class Copy(NamedTuple):
    """Version of a unit as one rank has saved it; several places may keep it."""

    rank: int
    position: Position
    unit: str
    version: VersionNumber
    checksum: str


class Left:
    """Everything that was found of a state, and of single units in others. Owned by the training thread.

    Attributes:
        indexes: of the state that is to be recovered, by rank; of each the best. Of another layout those of
            the overview.
        newest_gaps: by layer name, the start and iteration of the newest state, and its ``[expert]`` gaps.
        sources: of each copy, best first.
        units, parameters: of each copy its entry, and those of the parameters of its rank.
        copies: by position and unit name, best first.
        lost: copies that a rank could not read anywhere, as all ranks know.
    """

    def __init__(
        self,
        readers: Readers,
        own: Sequence[Source],
        others: Iterable[Source] = (),
        *,
        most_iteration: int | None = None,
    ) -> None:
        """Remember where to look.

        Args:
            own: sources of the state itself, best first.
            others: sources of other states of the run, of which single units may be used.
            most_iteration: latest iteration of these; None for any.
        """
        self.readers = readers
        self._most_iteration = most_iteration
        known = set(own)
        self._waiting = [(each, True) for each in own]
        self._waiting += [(each, False) for each in others if each not in known]
        self.indexes: dict[int, Index] = {}
        self.newest_gaps: dict[str, tuple[VersionNumber, Sequence[Gaps]]] = {}
        self.sources: dict[Copy, list[Source]] = defaultdict(list)
        self.units: dict[Copy, UnitEntry] = {}
        self.parameters: dict[Copy, Mapping[str, ParameterEntry]] = {}
        self.copies: dict[tuple[Position, str], list[Copy]] = defaultdict(list)
        self.origins: set[tuple[str, str]] = set()
        self.lost: set[Copy] = set()
        self._failed: set[tuple[Copy, Source]] = set()

    @property
    def sources_to_open(self) -> list[Source]:
        """Sources that were not looked at."""
        return [source for source, _ in self._waiting]

    def look_further(self) -> bool:
        """Open the next source that can be read; return whether there is one."""
        while self._waiting:
            source, is_own = self._waiting.pop(0)
            if (reader := self.readers.open(source)) is not None:
                self._add(source, reader.index, is_own)
                return True
        return False

    def first_index(self) -> Index | None:
        """Return the index of the best source that can be read; None if there is none."""
        while not self.indexes and self.look_further():
            pass
        return next(iter(self.indexes.values()), None)

    def look_at_all(self) -> None:
        """Open all sources."""
        while self.look_further():
            pass

    def look_at(self, sources: Collection[Source]) -> None:
        """Open some of the sources, and never another one."""
        self._waiting = [each for each in self._waiting if each[0] in sources]
        self.look_at_all()

    def _add(self, source: Source, index: Index, is_own: bool) -> None:
        version = source.version
        self.origins.update(index.origins.items())
        age = version.start.number, version.iteration
        for layer, gaps in index.progress.gaps.items() if index.progress else ():
            if layer not in self.newest_gaps or self.newest_gaps[layer][0] < age:
                self.newest_gaps[layer] = age, gaps
        if is_own:
            self.indexes.setdefault(version.rank, index)
            for position, units in enumerate(index.compute):
                for name, unit in units.items():
                    self._add_unit(source, index, position, name, unit)
        elif self._most_iteration is not None and version.iteration > self._most_iteration:
            return
        for name, unit in chain(index.units.items(), (index.retained or {}).items()):
            self._add_unit(source, index, None, name, unit)

    def _add_unit(
        self, source: Source, index: Index, position: Position, name: str, unit: UnitEntry
    ) -> None:
        copy = Copy(source.version.rank, position, name, unit.version, unit.checksum)
        self.sources[copy].append(source)
        if copy in self.units:
            return
        self.units[copy] = unit
        self.copies[position, name].append(copy)
        self.parameters[copy] = index.parameters

    def readable(self, copy: Copy) -> list[Source]:
        """Return the sources of a copy that have not failed, best first."""
        return [each for each in self.sources[copy] if (copy, each) not in self._failed]

    def give_up(self, copy: Copy, source: Source, error: Exception) -> None:
        """Note that a copy cannot be read from a source."""
        self.readers.say(source, error)
        self._failed.add((copy, source))

    @property
    def unreadable(self) -> frozenset[Copy]:
        """Copies that could be read from no source, and of which other ranks do not know that yet."""
        failed = {copy for copy, _ in self._failed} - self.lost
        return frozenset(copy for copy in failed if not self.readable(copy))


def version_of(entry: UnitEntry) -> UnitVersion:
    """Return the version of an entry, as strategies know it."""
    return UnitVersion(
        iteration=entry.iteration, routed_tokens=entry.routed_tokens, gaps=entry.gaps
    )
