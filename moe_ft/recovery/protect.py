"""Last phase of a start: protect. The checkpoint engine starts, and keeps what the recovery rests on.

Memory with the recovered state stays until a newer window replaces it, and peers that lack the state get it.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from msgspec.msgpack import Decoder

from moe_ft.config.fields import size_text
from moe_ft.engine import exchange
from moe_ft.engine.build import build_engine
from moe_ft.engine.engine import CheckpointEngine, EngineContext
from moe_ft.engine.memory.job_directory import file_system_type, rank_and_holder
from moe_ft.engine.memory.rank_memory import holds
from moe_ft.engine.memory.region_stores import FetchedVersion
from moe_ft.engine.memory.restored import FetchedWindow, Handover
from moe_ft.engine.persist.requests import WriterSettings
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.errors import BusyError, ConfigError, PinError, SnapshotError
from moe_ft.format.entries import UnitEntry
from moe_ft.format.identity import Family, Identity, Start
from moe_ft.planning.host_memory import regions_at_peers
from moe_ft.planning.placement import sources_of
from moe_ft.planning.recovery import Source
from moe_ft.planning.tiers import MEMORY, STORAGE
from moe_ft.recovery.claim import Claimed, memory_of
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.job_memory import measure
from moe_ft.recovery.meet import Met
from moe_ft.recovery.readers import FetchedUnit
from moe_ft.recovery.restore import Restored
from moe_ft.recovery.site import Site
from moe_ft.strategies.interface import Strategy
from moe_ft.topology import RankInfo, Topology

_MOST_POOLS = 16  # of other layouts in one directory
_POOLS = Decoder(set[int])


def protect(
    met: Met,
    claimed: Claimed,
    identity: Identity,
    lock: StorageLock | None,
    origins: Mapping[str, str],
    restored: Restored | None,
    trouble: str = "",
) -> CheckpointEngine:
    """Start the engine, which the caller closes. Called by all ranks.

    Args:
        trouble: why the persist directory cannot be used yet; empty if it can be.

    Raises:
        BusyError: if there is no room for the regions of a rank.
        ConfigError: if CUDA cannot pin them.
    """
    if restored is not None and restored.plan.is_other_layout:
        if not met.strategy.rotation.is_empty:
            met, claimed = clear_of_pools(met, claimed)
        claimed.memory.stay_clear()
        make_room(met.site, met.peers, _needed(restored))
        missing = met.ranks.everyone.gather(claimed.memory.num_missing_bytes, exchange.INT)
        met.ranks.check_together(partial(check_room, met.site, missing))
    site, peers = met.site, _peers_of(met)
    if met.groups and restored is not None:
        is_lacking = claimed.memory.parity_of(*_kept_state(restored, site.rank)) is None
        lacking = met.ranks.everyone.gather(is_lacking, exchange.BOOL)
        peers = tuple(each for each in peers if lacking[each.rank])
    engine = _build(met, claimed, identity, lock, origins, trouble)
    iteration = met.facts.iteration if restored is None else restored.plan.iteration

    def start() -> None:
        try:
            make_room(site, met.peers, _needed(restored))
            given = hand_over(restored, met.strategy, site.node_dir, site.rank, peers)
            engine.start(iteration, given)
        except PinError as error:
            raise _pin_refusal(site, error) from error
        except (OSError, SnapshotError) as error:
            raise BusyError(  # a file system that is too small was refused before
                f"--moe-ft-memory-dir={site.config.memory.memory_dir} cannot hold the regions of rank "
                f"{site.rank} on node {site.node}: {error}. Enlarge its file system (mount -o "
                "remount,size=...): what other ranks have left there is needed until a new "
                "snapshot is complete."
            ) from error

    with ExitStack() as opened:
        opened.callback(engine.close)
        met.ranks.check_together(start)
        engine.protect()
        opened.pop_all()
    return engine


def _pin_refusal(site: Site, error: PinError) -> ConfigError:
    memory_dir, kind = site.config.memory.memory_dir, file_system_type(site.node_dir)
    cause = (
        "locked memory is limited (ulimit -l, or by the container), a sandbox such as gVisor forbids it, or "
        "the file has more than 512 GiB. Raise the limit, which `python -m moe_ft doctor` shows"
    )
    if kind != "tmpfs":
        cause = f"the directory is on {kind}, and Linux pins only tmpfs. Name one below /dev/shm"
    return ConfigError(
        f"--moe-ft-pin=require with --moe-ft-memory-dir={memory_dir}: the memory of rank {site.rank} on node "
        f"{site.node} cannot be pinned for its GPU: {error}. Likely causes: {cause}; or give --moe-ft-pin "
        "try: then snapshots take longer, and training waits for them."
    )


def _build(
    met: Met,
    claimed: Claimed,
    identity: Identity,
    lock: StorageLock | None,
    origins: Mapping[str, str],
    trouble: str,
) -> CheckpointEngine:
    config, peers = met.config, _peers_of(met)
    own = met.site.topology.ranks[met.site.rank]
    return build_engine(
        config,
        EngineContext(
            rank=met.site.rank,
            topology=met.site.topology,
            identity=identity,
            parameters=met.live.parameters,
            model_places=met.live.model_places,
            memory=claimed.memory,
            origins=origins,
            stage_load=met.ranks.stage if met.strategy.counted_layers else None,
            peers=peers,
            server=met.server,
            token=met.token,
            writer=_writer_settings(met.site, lock),
            phase_hook=met.live.phase_hook,
            breakpoint=met.breakpoint,
            traffic=met.facts.traffic,
            record_settings=met.facts.record_settings,
            storage_trouble=trouble,
            halves_peers=regions_at_peers(config.memory, len(peers)) == 1
            and not own.num_slots
            and not met.groups,
        ),
        met.strategy,
        met.ranks.everyone,
        met.live.layouts,
        met.live.records.complete,
    )


def _kept_state(restored: Restored, rank: int) -> tuple[Start, int]:
    """Return writer and iteration of the state that the regions of a rank keep."""
    version = (restored.kept or restored.plan).sources_of(rank)[0].version
    return version.start, version.iteration


def _peers_of(met: Met) -> tuple[RankInfo, ...]:
    """Return the ranks that keep this rank's replicas."""
    return tuple(met.site.topology.ranks[peer] for peer in met.peers[met.site.rank])


def _writer_settings(site: Site, lock: StorageLock | None) -> WriterSettings | None:
    """Return the settings of the node's writer process; None on ranks that start none."""
    if not (site.is_lowest_on_node and site.config.storage.persists):
        return None
    return WriterSettings(
        url=site.config.storage.persist_dir or "",
        keep=site.config.storage.keep,
        keeps_whole=site.config.storage.keeps_whole,
        parent=os.getpid(),
        log_format=site.config.observability.log_format,
        lock_owner=lock.owner if lock is not None else "",
    )


def hand_over(
    restored: Restored | None,
    strategy: Strategy,
    node_dir: Path,
    rank: int,
    peers: Sequence[RankInfo],
) -> Handover | None:
    """Return what the engine of a rank must know about the recovered state; None if nothing was recovered."""
    if restored is None:
        return None
    rotating = {str(unit) for unit in strategy.rotation.units}
    fetched, plan = restored.fetched, restored.plan
    sources = plan.sources_of(rank)
    # Without snapshots to keep there are none that hold the breakpoints' iteration either.
    kept = (restored.kept or plan).sources_of(rank)
    family = kept[0].version.family  # a plan has some for every rank
    is_stored = any(source.tier == STORAGE for source in kept)
    # With a pool a state is in more than its region; the strategy takes the next snapshot at once.
    # A state of another layout is kept as it is, in the regions and directories of the ranks that were.
    is_moved = any(source.version.layout for source in (*sources, *kept))
    is_in_one_file = strategy.rotation.is_empty and not is_moved
    is_at_risk = is_in_one_file and not is_stored
    if _is_of_family(fetched, family):
        is_in_place = is_at_risk and _is_in_place(fetched)
        window = _window_of(fetched) if is_at_risk and not is_in_place else None
    else:  # these snapshots were not read, and stay where they are
        is_in_place, window = is_at_risk and any(map(_is_own_region, kept)), None
    return Handover(
        indexes=frozenset(
            node_dir / each.source.version.path
            for name, each in fetched.units.items()
            if name in rotating and each.source.tier == MEMORY and not is_moved
        ),
        rotating={
            name: version
            for name, each in fetched.units.items()
            if name in rotating and (version := _pool_version(each, restored.pooled)) is not None
        },
        # Of a local recovery's target the ranks keep no snapshots, even if these were what was read.
        needs_breakpoint=plan.basis.is_on_breakpoints
        or plan.is_local
        or restored.pooled is not None,
        persisted_index=restored.persisted_index,
        family=family,
        replay_from=min(each.replay_from for each in (plan, restored.kept) if each is not None),
        is_on_storage=is_in_one_file
        and any(_is_stored_state(source, plan.iteration) for source in sources),
        window=window,
        is_moved=is_moved,
        peers_without=_peers_without(kept, peers)
        if is_in_place or window is not None
        else frozenset(),
    )


def _is_stored_state(source: Source, iteration: int) -> bool:
    """Return whether storage has the state of an iteration as one snapshot of everything."""
    version = source.version
    return source.tier == STORAGE and (version.window, version.iteration) == (1, iteration)


def _pool_version(
    fetched: FetchedUnit, pooled: Mapping[str, UnitEntry] | None
) -> FetchedVersion | None:
    """Return the version of a rotating unit that the pool is to hold; None for none."""
    if pooled is None or not fetched.source.version.is_breakpoint:
        return FetchedVersion(
            entry=fetched.entry, content=fetched.content, is_in_pool=fetched.stays
        )
    entry = pooled.get(str(fetched.unit))
    if entry is None:
        return None
    return FetchedVersion(entry=entry, content=memoryview(b""), is_in_pool=True)


def _is_own_region(source: Source) -> bool:
    version = source.version
    return source.tier == MEMORY and not version.is_replica and not version.is_breakpoint


def _is_of_family(fetched: Fetched, family: Family) -> bool:
    """Return whether what was read is what is kept. Stages that recover alone differ in that."""
    return all(each.source.version.family == family for each in _units_of(fetched))


def _is_in_place(fetched: Fetched) -> bool:
    """Return whether everything that was read lies in one of this rank's own regions."""
    sources = {each.source for each in _units_of(fetched)}
    return len(sources) <= 1 and all(map(_is_own_region, sources))


def _units_of(fetched: Fetched) -> Iterator[FetchedUnit]:
    yield from fetched.units.values()
    for weights in fetched.compute:
        yield from weights.values()


def _window_of(fetched: Fetched) -> FetchedWindow | None:
    """Return everything that was read; None if it is not all in one region."""
    index = fetched.index
    if index is None or any(unit.file for unit in index.units.values()):
        return None
    read = {each.entry.offset: each for each in _units_of(fetched)}
    checksums = {offset: each.entry.checksum for offset, each in read.items()}
    if checksums != {unit.offset: unit.checksum for _, unit in index.entries()}:
        return None  # sources differ
    contents = {offset: each.content for offset, each in read.items()}
    return FetchedWindow(index=index, contents=contents)


def _peers_without(sources: Sequence[Source], peers: Sequence[RankInfo]) -> frozenset[int]:
    """Return the peers of a rank that do not keep what was recovered."""
    holders = {
        (source.version.node, rank_and_holder(PurePosixPath(source.version.path).parent.name)[1])
        for source in sources
        if source.version.is_replica
    }
    return frozenset(peer.rank for peer in peers if (peer.node, peer.rank) not in holders)


def _needed(restored: Restored | None) -> list[tuple[Start, int]]:
    """Return writer and iteration of the states that a recovery rests on: the state, and what is kept."""
    plans = [] if restored is None else [restored.plan, restored.kept]
    return [state for plan in plans if plan is not None for state in plan.basis.states]


def make_room(
    site: Site, peers: Sequence[tuple[int, ...]], needed: Sequence[tuple[Start, int]]
) -> None:
    """Remove the memory of other placements on this node, except for the state that was recovered.

    That state stays until a newer snapshot is complete and at its peers.

    Args:
        peers: ``[rank]`` the ranks that keep its replicas now.
        needed: writer and iteration of the state that was recovered, and of what is kept with it.
    """
    here = {info.rank for info in site.topology.on_node(site.node)}
    for directory in site.node_dir.iterdir() if site.is_lowest_on_node else ():
        owner, holder = rank_and_holder(directory.name)
        is_used = holder in here and (owner == holder or owner in sources_of(peers, holder or 0))
        if owner is None or is_used or directory.is_symlink():
            continue
        is_needed = False
        for data in [
            *directory.glob("region_*.safetensors"),
            *directory.glob("breakpoint*.safetensors"),
        ]:
            index = data.with_suffix(".json")
            if not any(holds(index, *state) for state in needed):
                index.unlink(missing_ok=True)
                data.unlink(missing_ok=True)
            else:
                is_needed = True
        others = [*directory.glob("pool_*.safetensors"), *directory.glob("boundary_*")]
        for path in others if not is_needed else ():
            path.unlink(missing_ok=True)


def check_room(site: Site, missing: Sequence[int]) -> None:
    """Compare the memory that a node needs next to the state of another layout with what it has.

    Args:
        missing: ``[rank]`` bytes that are not reserved yet.

    Raises:
        ConfigError: if that is too much.
        BusyError: if it is as long as others use the file system.
    """
    memory = site.config.memory
    added = sum(missing[info.rank] for info in site.topology.on_node(site.node))
    kept, usage = measure(site.node_dir)[0], shutil.disk_usage(site.node_dir)
    what = (
        f"node {site.node} keeps the state of another layout ({size_text(kept)}) until all ranks have a "
        f"snapshot, and needs {size_text(added)} next to it"
    )
    remedy = (
        "Lower --moe-ft-replication-factor for this start, use more nodes, or recover from "
        "--moe-ft-persist-dir after `python -m moe_ft clean`."
    )
    limit = memory.host_memory_limit_bytes
    if limit is not None and kept + added > limit:
        raise ConfigError(
            f"--moe-ft-layout=any with --moe-ft-host-memory-limit={memory.host_memory_limit}: {what}, more "
            f"than the limit. Raise it if the node has the memory. {remedy}"
        )
    if added > usage.free:
        raise (ConfigError if kept + added > usage.total else BusyError)(
            f"--moe-ft-layout=any with --moe-ft-memory-dir={memory.memory_dir}: {what}; its file system has "
            f"{size_text(usage.free)} left. Enlarge it (mount -o remount,size=...). {remedy}"
        )


def clear_of_pools(met: Met, claimed: Claimed) -> tuple[Met, Claimed]:
    """Return memory whose pools are not those of another layout. Called by all ranks.

    A pool's name is its geometry, which may be the same: its slots would then be filled with versions of this
    layout while the state that was recovered is still needed.
    """
    taken = set[int]()
    for more in range(_MOST_POOLS):
        memory = memory_of(met, _with_slots(met.site.topology, more))
        pools = [memory.pool, *(each.pool for each in memory.replicas.values())]
        if any(pool is not None and pool.data_path.exists() for pool in pools):
            taken.add(more)
    everywhere = set[int]().union(*met.ranks.everyone.gather(taken, _POOLS))
    more = min({*range(_MOST_POOLS + 1)} - everywhere)
    site = replace(met.site, topology=_with_slots(met.site.topology, more))
    claimed.memory.close()
    memory = memory_of(met, site.topology)
    memory.take_up(claimed.memory.mappings)
    return replace(met, site=site), replace(claimed, memory=memory)


def _with_slots(topology: Topology, more: int) -> Topology:
    ranks = (
        replace(info, num_slots=info.num_slots + more) if info.num_slots else info
        for info in topology.ranks
    )
    return Topology(ranks=tuple(ranks))
