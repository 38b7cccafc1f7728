"""Handover of a recovered state to the engine: windows that only peers have, and peers without it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.planning.recovery import Plan, Source, StagePlan, Version
from moe_ft.planning.tiers import MEMORY, PEER, STORAGE, Tier
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.protect import hand_over
from moe_ft.recovery.readers import FetchedUnit
from moe_ft.recovery.restore import Restored
from moe_ft.strategies.dense import DenseStrategy
from moe_ft.strategies.interface import Rotation
from moe_ft.topology import RankInfo
from moe_ft.units import parse_unit
from tests.unit.moe_ft.builders import FRESH, make_history, make_window

PEERS = [
    RankInfo(
        rank=rank,
        node=node,
        stage=0,
        pid=1,
        address=None,
        region_bytes=1,
        slot_bytes=0,
        num_slots=0,
    )
    for rank, node in ((2, "b"), (5, "c"))
]
WINDOW = make_window()
HISTORY = make_history(FRESH)


def source(tier: Tier, node: str | None, path: str, window: int = 3) -> Source:
    return Source(
        tier=tier,
        version=Version(
            rank=0,
            iteration=7,
            lineage="run-a",
            history=HISTORY,
            node=node,
            path=path,
            tier=STORAGE if node is None else MEMORY,
            is_replica=path.startswith("replica"),
            window=window,
        ),
    )


AT_2 = source(PEER, "b", "replica_00000_at_00002/region_0.json")
AT_5 = source(PEER, "c", "replica_00000_at_00005/region_1.json")
OWN = source(MEMORY, "a", "rank_00000/region_0.json")
STORED = source(STORAGE, None, "iter_0000007/rank_00000.json")


def content_of(unit: UnitEntry) -> bytes:
    return WINDOW.content[unit.offset : unit.offset + unit.num_bytes]


def fetched(index: Index = WINDOW.index, origin: Source = AT_2) -> Fetched:
    """Return a window that was read from one source."""

    def read(units: dict[str, UnitEntry]) -> dict[str, FetchedUnit]:
        return {
            name: FetchedUnit(
                unit=parse_unit(name),
                source=origin,
                entry=unit,
                content=memoryview(content_of(unit)),
                stays=False,
            )
            for name, unit in units.items()
        }

    return Fetched(
        index=index, units=read(index.units), compute=[read(each) for each in index.compute]
    )


def plan_of(sources: list[Source], target: int = 7) -> Plan:
    """Return the plan to read these sources of rank 0."""
    stage = StagePlan(target=target, replay_from=5, sources={0: tuple(sources)})
    return Plan(
        iteration=target,
        lineage="run-a",
        history=HISTORY,
        start=HISTORY[-1],
        stages={0: stage},
    )


def hand(
    sources: list[Source],
    state: Fetched | None = None,
    *,
    rotates: bool = False,
    kept: list[Source] | None = None,
    plan: Plan | None = None,
) -> Any:
    """Return what the engine of rank 0 is told, which keeps what it has read or something else."""
    conversion: Any = None
    plan = plan or plan_of(sources, 7 if kept is None else 9)
    restored = Restored(
        plan=plan,
        fetched=state or fetched(),
        conversion=conversion,
        persisted_index="",
        loss=None,
        kept=plan if kept is None else plan_of(kept),
    )
    used = SimpleNamespace(rotation=Rotation(is_empty=not rotates))
    return hand_over(restored, used, Path("/memory/a"), 0, PEERS)  # type: ignore[arg-type]


def test_nothing_is_told_where_nothing_was_recovered() -> None:
    assert hand_over(None, DenseStrategy([]), Path(), 0, PEERS) is None


def test_window_of_a_peer_is_handed_over_with_all_of_its_versions() -> None:
    window = hand([AT_2]).window
    assert window.index == WINDOW.index
    assert {offset: bytes(content) for offset, content in window.contents.items()} == {
        unit.offset: content_of(unit) for _, unit in WINDOW.index.entries()
    }


@pytest.mark.parametrize(
    ("sources", "lacking"),
    [
        ([AT_2], {5}),
        ([OWN, AT_5], {2}),
        ([OWN, AT_2, AT_5], set()),
        # A replica that another rank keeps, or that this one kept on a node that is now another's.
        ([OWN, source(PEER, "b", "replica_00000_at_00003/region_0.json")], {2, 5}),
        ([OWN, source(PEER, "d", "replica_00000_at_00002/region_0.json")], {2, 5}),
        # What is on storage is safe.
        ([AT_2, STORED], set()),
    ],
)
def test_peers_without_the_state_are_named(sources: list[Source], lacking: set[int]) -> None:
    assert hand(sources).peers_without == lacking


def test_window_that_is_intact_in_own_memory_is_not_handed_over_and_goes_to_peers() -> None:
    told = hand([OWN, AT_2], fetched(origin=OWN))
    assert (told.window, told.peers_without) == (None, {5})


def test_window_of_which_a_part_came_from_elsewhere_is_handed_over() -> None:
    state = fetched(origin=OWN)
    first, *others = state.compute
    name = next(iter(first))
    changed = {**first, name: replace(first[name], source=AT_2)}
    assert hand([OWN, AT_2], replace(state, compute=[changed, *others])).window is not None


def test_window_of_a_stage_that_recovers_alone_from_its_own_memory_stays_there() -> None:
    told = hand([OWN, AT_2], fetched(origin=OWN), kept=[OWN, AT_2])
    assert (told.window, told.peers_without) == (None, {5})


def test_breakpoint_is_not_handed_over_in_place_of_the_window_that_is_kept() -> None:
    left = source(MEMORY, "a", "rank_00000/breakpoint.json", window=1)
    own = replace(left, version=replace(left.version, iteration=9, is_breakpoint=True))
    told = hand([own], fetched(origin=own), kept=[OWN, AT_2])
    assert (told.window, told.peers_without) == (None, {5})
    assert told.family == OWN.version.family
    told = hand([own], fetched(origin=own), kept=[AT_2])
    assert (told.window, told.peers_without) == (None, frozenset())


def test_breakpoints_stay_after_a_local_recovery_also_where_a_rank_has_read_snapshots() -> None:
    """No rank has a snapshot of its target."""
    of_all = plan_of([OWN, AT_2])
    assert not hand([OWN, AT_2], fetched(origin=OWN), plan=of_all).needs_breakpoint
    local = replace(of_all, scopes=())
    assert hand([OWN, AT_2], fetched(origin=OWN), plan=local).needs_breakpoint


def test_breakpoints_stay_if_one_is_all_that_a_rank_has() -> None:
    left = source(MEMORY, "a", "rank_00000/breakpoint.json", window=1)
    own = replace(left, version=replace(left.version, is_breakpoint=True))
    assert hand([own], fetched(origin=own)).needs_breakpoint
    assert not hand([own, OWN], fetched(origin=own)).needs_breakpoint


def test_nothing_is_brought_back_where_a_state_is_in_more_than_a_region() -> None:
    told = hand([AT_2], rotates=True)
    assert (told.window, told.peers_without) == (None, frozenset())


def test_state_on_storage_needs_no_place_in_memory() -> None:
    assert hand([AT_2, STORED]).window is None


def test_only_one_snapshot_of_everything_on_storage_need_not_be_written_again() -> None:
    whole = source(STORAGE, None, "iter_0000007/rank_00000.json", window=1)
    assert not hand([AT_2, STORED]).is_on_storage
    assert not hand([AT_2]).is_on_storage
    assert hand([AT_2, whole]).is_on_storage


def test_window_of_several_sources_that_differ_is_not_handed_over() -> None:
    state = fetched()
    name, unit = next(iter(state.units.items()))
    other = msgspec.structs.replace(unit.entry, checksum="0" * 16)
    changed = replace(unit, source=AT_5, entry=other)
    told = hand([AT_2, AT_5], replace(state, units={**state.units, name: changed}))
    assert (told.window, told.peers_without) == (None, frozenset())


def test_state_that_is_partly_in_a_pool_is_not_handed_over() -> None:
    units = WINDOW.index.units.items()
    pooled = {name: msgspec.structs.replace(unit, file="pool_1x64") for name, unit in units}
    index = msgspec.structs.replace(WINDOW.index, units=pooled)
    assert hand([AT_2], fetched(index)).window is None


def test_state_of_another_layout_stays_where_it_is_and_a_window_is_due_at_once() -> None:
    """Regions hold that of the ranks that were: sent on or taken for its own it would be that of another."""
    moved = [replace(each, version=replace(each.version, layout="other")) for each in (OWN, AT_2)]
    handed = hand(moved)
    assert handed.is_moved
    assert (handed.window, handed.peers_without) == (None, frozenset())
    assert handed.family == OWN.version.family
    stored = replace(STORED, version=replace(STORED.version, layout="other", window=1))
    assert not hand([stored]).is_on_storage
    assert not hand([OWN]).is_moved
