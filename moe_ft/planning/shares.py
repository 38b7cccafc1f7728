"""Shares of plans: rank 0 plans for all ranks, and each rank gets what it may read, as small as it can be.

What all ranks need goes to all of them once (`Common`). To each rank goes a share with the copies that it may
read. State of another layout is that of all ranks, so that its copies are common. Tables of versions name the
writer and the place of each by number; inventories of nodes travel in them too (recovery/inventory.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from moe_ft.format.entries import FileEntry
from moe_ft.format.identity import History
from moe_ft.planning.recovery import Ordered, Plan, Source, Version, order_sources, versions_of
from moe_ft.planning.scope import SentLog
from moe_ft.planning.tiers import Tier

_REPLICA, _BREAKPOINT = 1, 2


class Writer(NamedTuple):
    """Fields of a version that many have in common."""

    lineage: str
    history: History
    replay_settings: str
    superseded: tuple[str, ...]
    began_with: str
    layout: str
    world_size: int


class VersionRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A version; its writer and its place by number, its marks as bits."""

    writer: int
    place: int
    rank: int
    iteration: int
    window: int
    marks: int
    path: str
    file: FileEntry | None = None


class Table(msgspec.Struct, frozen=True, array_like=True):
    """Versions, and what their rows refer to by number: writers, and nodes with the tier that holds them."""

    writers: list[Writer]
    places: list[tuple[Tier, str | None]]
    rows: list[VersionRow]


class Packer:
    """Makes rows of versions. The versions must live at least as long."""

    def __init__(self) -> None:
        self._writers: dict[Writer, int] = {}
        self._places: dict[tuple[Tier, str | None], int] = {}
        # By the identities of what is long: the versions of one writer share it.
        self._known: dict[tuple[object, ...], int] = {}

    def row(self, version: Version) -> VersionRow:
        """Return the row of a version."""
        key = (
            version.lineage,
            id(version.history),
            id(version.replay_settings),
            id(version.superseded),
            version.began_with,
            version.layout,
            version.world_size,
        )
        writer = self._known.get(key)
        if writer is None:
            fields = Writer(*(getattr(version, name) for name in Writer._fields))
            writer = self._known[key] = self._writers.setdefault(fields, len(self._writers))
        return VersionRow(
            writer,
            self._places.setdefault((version.tier, version.node), len(self._places)),
            version.rank,
            version.iteration,
            version.window,
            version.is_replica * _REPLICA + version.is_breakpoint * _BREAKPOINT,
            "" if version.file is not None else version.path,
            version.file,
        )

    def table(self, versions: Iterable[Version] = ()) -> Table:
        """Return versions, with all writers and places that were seen so far."""
        rows = [self.row(each) for each in versions]
        return Table([*self._writers], [*self._places], rows)


class Unpacker:
    """Makes versions of rows. Those of one writer share what is long, also those of several tables."""

    def __init__(self) -> None:
        self._writers: dict[Writer, Writer] = {}

    def versions(self, table: Table, rows: Iterable[VersionRow] | None = None) -> list[Version]:
        """Return the versions of a table, or of rows that refer to it."""
        writers = [self._writers.setdefault(each, each)._asdict() for each in table.writers]
        return [
            Version(
                rank=row.rank,
                iteration=row.iteration,
                tier=table.places[row.place][0],
                node=table.places[row.place][1],
                path=row.path if row.file is None else row.file.index,
                is_replica=bool(row.marks & _REPLICA),
                is_breakpoint=bool(row.marks & _BREAKPOINT),
                window=row.window,
                file=row.file,
                **writers[row.writer],
            )
            for row in (table.rows if rows is None else rows)
        ]


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Share of one rank.

    Attributes:
        rows: the versions that it may read, each once.
        own, elsewhere, kept: numbers of the rows of the plan, of everything that the run has left, and of the
            plan that is kept.
        logs: those that it reads, with the number of their scope.
    """

    rows: list[VersionRow]
    own: list[int]
    elsewhere: list[int]
    kept: list[int]
    logs: list[tuple[int, SentLog]]


_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stripped:
    """Plan without sources.

    Attributes:
        breakpoints_first: see `Ordered`.
        own, elsewhere: tables of another layout, whose versions all ranks may read; None if they are in the
            shares.
    """

    plan: Plan
    breakpoints_first: bool | None
    own: Table | None
    elsewhere: Table | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Common:
    """Part of a plan, and of the one that is kept, that all ranks get.

    Attributes:
        kept: None if there is none, and if it is the same plan.
        table: what the rows of the shares refer to; it has none itself.
    """

    plan: Stripped
    kept: Stripped | None
    keeps_plan: bool
    table: Table


class _Rows:
    """Rows of one rank."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self.rows = list[VersionRow]()
        self._numbers: dict[int, int] = {}

    def add(self, versions: Iterable[Version]) -> list[int]:
        """Return the numbers of versions among the rows."""
        found = []
        for each in versions:
            number = self._numbers.setdefault(id(each), len(self.rows))
            if number == len(self.rows):
                self.rows.append(self._packer.row(each))
            found.append(number)
        return found


def share_out(
    plan: Plan, kept: Plan | None, num_ranks: int, *, needs_elsewhere: bool
) -> tuple[Common, list[bytes]]:
    """Return what all ranks get of a plan, and ``[rank]`` the shares, encoded.

    Args:
        kept: state that must stay in memory; None if there is none.
        needs_elsewhere: whether a rank may use what the run has left besides the state itself.
    """
    packer = Packer()
    common_plan = _strip(plan, needs_elsewhere=needs_elsewhere)
    common_kept = None
    if kept is not None and kept is not plan:
        common_kept = _strip(kept, needs_elsewhere=False)
    logs: dict[int, list[tuple[int, SentLog]]] = defaultdict(list)
    for number, scope in enumerate(plan.scopes):
        for log in scope.logs:
            logs[log.receiver].append((number, log))
    sources, kept_sources = _sources_of(plan), {} if kept is None else _sources_of(kept)
    has_own = common_plan.own is None
    shares = []
    for rank in range(num_ranks):
        rows = _Rows(packer)
        own = rows.add(versions_of(sources[rank], rank)) if has_own else []
        elsewhere, of_kept = list[int](), list[int]()
        if has_own and needs_elsewhere and rank in plan.elsewhere:
            elsewhere = rows.add(versions_of(plan.elsewhere, rank))
        if common_kept is not None and common_kept.own is None:
            of_kept = rows.add(versions_of(kept_sources[rank], rank))
        share = Share(rows.rows, own, elsewhere, of_kept, logs.get(rank, []))
        shares.append(_ENCODER.encode(share))
    common = Common(
        plan=common_plan, kept=common_kept, keeps_plan=kept is plan, table=packer.table()
    )
    return common, shares


def take_share(
    common: Common, share: Share, *, rank: int, stage: int, node: str
) -> tuple[Plan, Plan | None]:
    """Return a plan, and the one that is kept, with the sources of one rank alone."""
    unpacker = Unpacker()
    versions = unpacker.versions(common.table, share.rows)

    def complete(stripped: Stripped, own: list[int], elsewhere: list[int] | None) -> Plan:
        read = [versions[each] for each in own]
        if stripped.own is not None:
            read = unpacker.versions(stripped.own)
        left = None if elsewhere is None else [versions[each] for each in elsewhere]
        if stripped.elsewhere is not None:
            left = unpacker.versions(stripped.elsewhere)
        plan, first = stripped.plan, stripped.breakpoints_first
        way = replace(
            plan.stages[stage], sources={rank: Ordered({rank: read}, {rank: node}, first)[rank]}
        )
        others = {} if left is None else {rank: order_sources(left, node)}
        stages = {**plan.stages, stage: way}
        return replace(plan, stages=stages, elsewhere={**plan.elsewhere, **others})

    plan = _with_logs(complete(common.plan, share.own, share.elsewhere or None), share.logs)
    if common.kept is None:
        return plan, plan if common.keeps_plan else None
    return plan, complete(common.kept, share.kept, None)


def _with_logs(plan: Plan, logs: Sequence[tuple[int, SentLog]]) -> Plan:
    scopes = [
        replace(scope, logs=tuple(log for of, log in logs if of == number))
        for number, scope in enumerate(plan.scopes)
    ]
    return replace(plan, scopes=tuple(scopes))


def _sources_of(plan: Plan) -> dict[int, Mapping[int, tuple[Source, ...]]]:
    """Return by rank the sources of its stage."""
    return {rank: stage.sources for stage in plan.stages.values() for rank in stage.sources}


def _strip(plan: Plan, *, needs_elsewhere: bool) -> Stripped:
    """Return a plan without the sources of ranks."""
    basis = plan.basis
    some = next(iter(plan.stages.values())).sources
    stages = {number: replace(stage, sources={}) for number, stage in plan.stages.items()}
    bare = replace(plan, stages=stages, elsewhere=dict(_answers(plan)), noted=basis)
    own = elsewhere = None
    if plan.is_other_layout:
        rank = next(iter(some))
        own = Packer().table(versions_of(some, rank))
        if needs_elsewhere:
            elsewhere = Packer().table(versions_of(plan.elsewhere, rank))
    return Stripped(
        plan=_with_logs(bare, ()),
        breakpoints_first=some.breakpoints_first if isinstance(some, Ordered) else None,
        own=own,
        elsewhere=elsewhere,
    )


def _answers(plan: Plan) -> Iterator[tuple[int, tuple[Source, ...]]]:
    """Yield by their owners the states whose records answer in a local recovery, for any reader."""
    places: dict[int, set[tuple[str | None, str]]] = defaultdict(set)
    for scope in plan.scopes:
        for record in (each for records in scope.records.values() for each in records):
            if record.numbers is None:
                places[record.rank].add((record.node, record.path))
    for rank, found in places.items():
        if rank in plan.elsewhere:
            sources = plan.elsewhere[rank]
            yield (
                rank,
                tuple(each for each in sources if (each.version.node, each.version.path) in found),
            )
