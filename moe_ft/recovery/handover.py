"""What the checkpoint engine is told of a recovery: which memory to keep, what to bring back to peers."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from moe_ft.engine.context import RestoredState, RestoredWindow
from moe_ft.engine.pool import RestoredVersion
from moe_ft.engine.regions import rank_and_holder
from moe_ft.planning.recovery import Source, Tier
from moe_ft.recovery.recover import Recovered
from moe_ft.recovery.restore import FetchedState, FetchedUnit
from moe_ft.strategies.interface import Strategy
from moe_ft.topology import RankInfo


def hand_over(
    recovered: Recovered, strategy: Strategy, node_dir: Path, rank: int, peers: Sequence[RankInfo]
) -> RestoredState | None:
    """Return what the engine of a rank must know of what was recovered, None if nothing was.

    Args:
        recovered: on this rank.
        strategy: of this start.
        node_dir: the memory directory of the rank's node.
        rank: this one.
        peers: that keep its replicas.
    """
    if recovered.plan is None:
        return None
    rotating = {str(unit) for unit in strategy.rotating}
    fetched, sources = recovered.fetched, recovered.plan.sources[rank]
    is_stored = any(source.tier is Tier.STORAGE for source in sources)
    # With a pool a state is in more than its region: the next one is taken at once.
    is_at_risk = strategy.saves_all and not is_stored
    is_in_place = is_at_risk and _is_in_place(fetched)
    window = _window_of(fetched) if is_at_risk and not is_in_place else None
    return RestoredState(
        indexes=frozenset(
            node_dir / each.source.version.path
            for name, each in fetched.units.items()
            if name in rotating and each.tier is Tier.MEMORY
        ),
        rotating={
            name: RestoredVersion(entry=each.entry, content=each.content, is_in_pool=each.stays)
            for name, each in fetched.units.items()
            if name in rotating
        },
        persisted_index=recovered.previous[0],
        family=sources[0].version.family,  # a plan has some for every rank
        is_on_storage=strategy.saves_all
        and any(source.tier is Tier.STORAGE and source.version.window == 1 for source in sources),
        window=window,
        peers_without=_peers_without(sources, peers)
        if is_in_place or window is not None
        else frozenset(),
    )


def _is_in_place(fetched: FetchedState) -> bool:
    """Return whether all that was read lies in one region of this rank itself."""
    sources = {each.source for each in _units_of(fetched)}
    return len(sources) <= 1 and all(
        source.tier is Tier.MEMORY and not source.version.is_replica for source in sources
    )


def _units_of(fetched: FetchedState) -> Iterator[FetchedUnit]:
    yield from fetched.units.values()
    for weights in fetched.compute:
        yield from weights.values()


def _window_of(fetched: FetchedState) -> RestoredWindow | None:
    """Return all that was read, None if it is not all in one region."""
    index = fetched.index
    if index is None or any(unit.file for unit in index.units.values()):
        return None
    read = {each.entry.offset: each for each in _units_of(fetched)}
    checksums = {offset: each.entry.checksum for offset, each in read.items()}
    if checksums != {unit.offset: unit.checksum for _, unit in index.entries()}:
        return None  # sources differ
    contents = {offset: each.content for offset, each in read.items()}
    return RestoredWindow(index=index, contents=contents)


def _peers_without(sources: Sequence[Source], peers: Sequence[RankInfo]) -> frozenset[int]:
    """Return the peers of a rank that do not keep what was recovered."""
    holders = {
        (source.version.node, rank_and_holder(PurePosixPath(source.version.path).parent.name)[1])
        for source in sources
        if source.version.is_replica
    }
    return frozenset(peer.rank for peer in peers if (peer.node, peer.rank) not in holders)
