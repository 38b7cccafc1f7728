"""Second phase of a start: a rank claims its directories, locks and room in memory.

Every check raises a ConfigError with the flag, the value, the rule and the remedy; all ranks raise what one
of them raises. recovery/job_memory.py has the checks of memory, recovery/persist_directory.py opens the
persist directory and takes its lock. `doctor` makes the same checks.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from msgspec.msgpack import Decoder

from moe_ft.engine.memory.mappings import Mappings
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.files.storage import Storage
from moe_ft.planning.host_memory import regions_at_peers
from moe_ft.planning.placement import sources_of
from moe_ft.recovery.attempts import RankError
from moe_ft.recovery.job_memory import check_memory, claim_memory, leave_place
from moe_ft.recovery.meet import Met
from moe_ft.recovery.persist_directory import (
    LateLock,
    PersistDirectory,
    Trouble,
    open_storage,
    origin_of,
    release_lock,
    take_lock,
    trouble_of,
)
from moe_ft.recovery.site import Site
from moe_ft.saying import warn
from moe_ft.strategies.registry import chosen
from moe_ft.topology import Topology

_TROUBLE = Decoder(tuple[Trouble | None] | RankError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimed:
    """A rank's claims on its node and on storage.

    Attributes:
        memory: this rank's share of the node's memory, not opened yet.
        lock: lock of the persist directory; None on all ranks but rank 0, and as long as it is that of an
            earlier start which is over.
        trouble: reason why some rank cannot use the persist directory, the same on all ranks; None if there
            is none.
    """

    memory: RankMemory
    storage: Storage | None
    lock: StorageLock | None
    trouble: Trouble | None = None


def claim(met: Met, opened: ExitStack, mappings: Mappings | None = None) -> Claimed:
    """Check this machine's directories, claim them, and open what the flags name. Called by all ranks.

    Args:
        mappings: what an earlier start of this process has mapped; None for nothing.

    Raises:
        ConfigError: if a directory in memory cannot be used, any is used by another job, or there is too
            little room.
    """
    site = met.site
    warn_of_inexactness(site, is_deterministic=met.facts.is_deterministic)
    met.ranks.check_together(lambda: opened.callback(leave_place, site, claim_memory(site)))

    def open_persist_directory() -> tuple[PersistDirectory, tuple[Trouble | None]]:
        directory = open_storage(site)
        if directory.lock is not None:  # at once: another rank may refuse
            opened.push(_unlocking(directory.lock))
        check_memory(site, met.peers, met.groups)
        return directory, (directory.trouble,)

    directory, found = met.ranks.find_together(open_persist_directory, _TROUBLE)
    memory = memory_of(met, site.topology)
    if mappings is not None:  # now, before any rank needs the room of what is not used again
        memory.take_up(mappings)
    return Claimed(
        memory=memory,
        storage=directory.storage,
        lock=directory.lock,
        trouble=next((each for (each,) in found if each is not None), None),
    )


def memory_of(met: Met, topology: Topology) -> RankMemory:
    """Return a rank's share of its node's memory, with the sizes that a topology says; nothing is opened."""
    site = met.site
    return RankMemory(
        site.node_dir,
        site.rank,
        topology,
        () if met.groups else sources_of(met.peers, site.rank),
        persists=site.config.storage.persists,
        replica_regions=regions_at_peers(site.config.memory, len(met.peers[site.rank])),
        parity=met.groups[site.rank] if met.groups else None,
    )


def take_over_lock(
    met: Met, claimed: Claimed, opened: ExitStack, *, may_wait: bool
) -> tuple[StorageLock | None, str]:
    """Take the persist directory's lock, from an earlier start that is over if that has it.

    Called by all ranks, once nothing that was found can refuse this start.

    Args:
        may_wait: whether to begin without storage if that cannot be used now.

    Returns:
        The lock and why it is not taken yet, which is empty if it is. Both on rank 0 only.

    Raises:
        ConfigError: if another job has it, or a flag is wrong so that storage can never be used.
        StorageAwayError: if storage cannot be used now, and that may not wait.
    """

    def take() -> tuple[StorageLock | None, str]:
        storage, trouble, lock = claimed.storage, claimed.trouble, claimed.lock
        if trouble is not None and not may_wait:
            raise trouble.refusal
        if storage is None or met.site.rank != 0 or not met.site.config.storage.persists:
            return None, ""
        if lock is None and trouble is None:
            try:
                lock = take_lock(met.site.job_id, storage, origin_of(met.site))
                opened.push(_unlocking(lock))
            except OSError as error:
                trouble = trouble_of(met.site, error)
                if not may_wait:
                    raise trouble.refusal from error
        if lock is None:
            lock = LateLock(storage, met.site.job_id, origin_of(met.site))
            lock.start(warn)
            opened.push(_unlocking(lock))
        return lock, "" if trouble is None else trouble.text

    # Also without storage: no engine may overwrite memory before all ranks have put it back.
    return met.ranks.check_together(take)


def _unlocking(lock: StorageLock) -> Callable[..., None]:
    """Return an exit that ends a lock's renewals, and after a refusal, when nothing was written, removes it.

    Otherwise the lock becomes stale, unless it was released before.
    """

    def end(kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ConfigError | UnrecoverableError):
            release_lock(lock)
        else:
            lock.close()

    return end


def warn_of_inexactness(site: Site, *, is_deterministic: bool) -> None:
    """Warn of settings that make recoveries less than bit for bit exact."""
    if site.rank != 0:
        return
    kind = chosen(site.config)
    if kind.replays and not is_deterministic:
        warn(
            f"without --deterministic-mode a recovery of --moe-ft-strategy {kind.name} is "
            "consistent, but not bit for bit the run without the failure"
        )
    precision = site.config.precision
    if precision.lossy_parts:
        kept = ", ".join(f"{part} as {each}" for part, each in precision.lossy_parts.items())
        warn(f"snapshots keep {kept}: recoveries are not exact")
        if precision.is_ruinous:
            warn(
                "without scales second moments in so few bits are mostly 0, and training "
                "diverges after a recovery: use bf16 or a block format for exp_avg_sq"
            )
