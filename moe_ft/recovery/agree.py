"""Sixth phase of a start: all ranks agree that together they have a whole state, before they use it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from msgspec.msgpack import Decoder

from moe_ft.format.identity import Start
from moe_ft.planning.recovery import Plan, Rejection
from moe_ft.recovery.fetch import Fetching
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.left import Copy
from moe_ft.recovery.meet import Met
from moe_ft.recovery.put_back import SharedSlices
from moe_ft.state.catalog import Slices, UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import UnitId, parse_unit

# Slices at FULL and at COMPUTE of the parameters that several ranks hold.
SnapshotSlices = tuple[SharedSlices, SharedSlices]
_LOST = Decoder(frozenset[Copy])
_MISSING = Decoder(tuple[tuple[Start, int], list[str]])
_PART = Decoder(tuple[int, dict[UnitId, int], list[tuple[Slices, Slices]]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """A window that the ranks have completely, as one rank puts it back.

    Attributes:
        slices: ``[snapshot]`` the slices that the ranks have read of parameters that several of them hold, at
            FULL and at COMPUTE.
        positions: for each unit of the stage the snapshot that has it at FULL.
        window: length of the longest window of all ranks; 0 before they have met for it.
    """

    fetched: Fetched
    slices: Sequence[SnapshotSlices]
    positions: Mapping[UnitId, int]
    window: int = 0


def fetch_together(
    plan: Plan, fetching: Fetching, met: Met
) -> tuple[Fetched, Agreed | None, list[Rejection]]:
    """Fetch a state and agree on it. Called by all ranks.

    If a rank cannot read something, all of them fetch again without it: another version of an expert, or
    another rank's copy, may take its place.
    """
    while True:
        fetched = fetching.fetch()
        agreed, rejected = agree(plan, fetched, met)
        if agreed is not None:
            return fetched, agreed, rejected
        lost = frozenset[Copy]().union(*met.ranks.everyone.gather(fetched.lost, _LOST))
        if not fetching.leave_out(lost):
            return fetched, agreed, rejected
        fetched.close()  # its borders have connections, and the next one has borders of its own


def agree(plan: Plan, fetched: Fetched, met: Met) -> tuple[Agreed | None, list[Rejection]]:
    """Agree on a state that every rank has read. Called by all ranks.

    Returns:
        The state, or None and the reasons if a rank lacks something of it.
    """
    places = {each.unit: fetched.position_of(each) for each in fetched.units.values()}
    own = met.site.rank, places, fetched.slices(met.live.catalog)
    parts = met.ranks.stage.gather(own, _PART)
    positions, conflicts = _agree_on_positions([found for _, found, _ in parts])
    slices = _arrange_slices({rank: found for rank, _, found in parts}, met)
    missing = [*fetched.missing, *conflicts]
    missing += _find_gaps(fetched, slices, positions, met.live.catalog)
    if fetched.index is None:
        missing.append("record")
    everyone = met.ranks.everyone.gather(((plan.start, plan.iteration), missing[:4]), _MISSING)
    assert len({tried for tried, _ in everyone}) == 1, "ranks recover different states"
    rejected = [
        Rejection(
            iteration=plan.iteration,
            start=plan.start,
            reason=f"iteration {plan.iteration}: rank {other} has no intact {', '.join(found[:3])}",
        )
        for other, (_, found) in enumerate(everyone)
        if found
    ]
    agreed = Agreed(fetched=fetched, slices=slices, positions=positions)
    return (None if rejected else agreed), rejected


def _agree_on_positions(parts: Sequence[dict[UnitId, int]]) -> tuple[dict[UnitId, int], list[str]]:
    """Return the snapshot that has each unit of the stage at FULL, and units on which ranks differ."""
    positions: dict[UnitId, int] = {}
    conflicts = []
    for found in parts:
        for unit, position in found.items():
            if positions.setdefault(unit, position) != position:
                conflicts.append(f"window in which all ranks have {unit} in one snapshot")
    return positions, conflicts


def _arrange_slices(
    everyone: Mapping[int, list[tuple[Slices, Slices]]], met: Met
) -> list[SnapshotSlices]:
    """Return the slices of shared parameters that the ranks of the data-parallel groups have."""
    dp, expt_dp = (
        [everyone[rank] for rank in dist.get_process_group_ranks(group)]
        for group in (met.live.groups.dp_cp, met.live.groups.expt_dp)
    )
    # A rank that could read nothing has no snapshots; it says so itself.
    length = max(map(len, everyone.values()))

    def at(position: int, level: int) -> SharedSlices:
        return SharedSlices(
            dp=[_at(found, position, level) for found in dp],
            expt_dp=[_at(found, position, level) for found in expt_dp],
        )

    return [(at(position, 0), at(position, 1)) for position in range(length)]


def _at(slices: Sequence[tuple[Slices, Slices]], position: int, level: int) -> Slices:
    return slices[position][level] if position < len(slices) else {}


def _find_gaps(
    fetched: Fetched,
    slices: Sequence[SnapshotSlices],
    positions: Mapping[UnitId, int],
    catalog: UnitCatalog,
) -> list[str]:
    """Return the parts that no rank has read of parameters that several ranks hold."""
    kept = {
        each.name
        for unit in map(parse_unit, fetched.rotation.kept)
        if catalog.has(unit)
        for each in catalog.parameters_of(unit)
    }
    kept |= catalog.frozen_names
    at_full = [full for full, _ in slices]
    gaps = [f"slice of {name}" for name in find_gaps(catalog.parameters, at_full, kept)]
    for position, (_, compute) in enumerate(slices):
        frozen = [each for each in catalog.parameters if positions.get(each.unit, 0) > position]
        gaps += [f"weights of {name}" for name in find_gaps(frozen, [compute], kept)]
    return gaps


def find_gaps(
    parameters: Sequence[LocalParameter],
    restored: Sequence[SharedSlices],
    kept: Collection[str],
) -> list[str]:
    """Return the names of shared parameters of which a part is missing, or was found twice."""
    gaps = []
    for local in parameters:
        if local.is_sharded or local.name in kept:
            continue
        found = [
            owned[local.name]
            for each in restored
            for owned in (each.expt_dp if local.is_expert else each.dp)
            if local.name in owned
        ]
        ends = [0, *(end for _, end in sorted(found))]
        starts = [*(start for start, _ in sorted(found)), local.parameter.numel()]
        if starts != ends:
            gaps.append(local.name)
    return gaps
