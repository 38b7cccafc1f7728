"""Second phase of a start: a rank claims its directories, locks and room in memory.

Every check raises a ConfigError with the flag, the value, the rule and the remedy; all ranks raise what one
of them raises. recovery/persist_directory.py opens the persist directory and takes its lock.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import filelock

from moe_ft.config.fields import size_text
from moe_ft.engine.memory.job_directory import entered_job, file_system_type
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.files.private_files import make_private, make_root
from moe_ft.files.storage import Storage
from moe_ft.planning.host_memory import NUM_REPLICA_REGIONS, num_regions
from moe_ft.planning.placement import plan_node_memory, sources_of
from moe_ft.recovery.job_memory import alive_lock, measure, other_jobs
from moe_ft.recovery.meet import Met
from moe_ft.recovery.persist_directory import (
    LateLock,
    Opened,
    Trouble,
    open_storage,
    origin_of,
    release_lock,
    take_lock,
    trouble_of,
)
from moe_ft.recovery.site import Site
from moe_ft.saying import say
from moe_ft.strategies.registry import chosen

_CLAIM_POLL_S = 0.05
_OLD_START_S = 20.0  # an older start's ranks may take a moment to die


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


def claim(met: Met, opened: ExitStack) -> Claimed:
    """Check this machine's directories, claim them, and open what the flags name. Called by all ranks.

    Raises:
        ConfigError: if a directory in memory cannot be used, any is used by another job, or there is too
            little room.
    """
    site, together = met.site, met.ranks.check_together
    warn_of_inexactness(site, is_deterministic=met.facts.is_deterministic)
    together(lambda: opened.callback(claim_memory(site).release))

    def open_persist_directory() -> Opened:
        directory = open_storage(site)
        if directory.lock is not None:  # at once: another rank may refuse
            opened.push(_unlocking(directory.lock))
        return directory

    directory = together(open_persist_directory)
    troubles = filter(None, met.ranks.everyone.gather(directory.trouble))
    together(lambda: check_memory(site, met.peers))
    memory = RankMemory(
        site.node_dir,
        site.rank,
        site.topology,
        sources_of(met.peers, site.rank),
        persists=site.writes_to_storage,
    )
    return Claimed(
        memory=memory,
        storage=directory.storage,
        lock=directory.lock,
        trouble=next(troubles, None),
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
        if storage is None or met.site.rank != 0 or not met.site.writes_to_storage:
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
            lock.start(say)
            opened.push(_unlocking(lock))
        return lock, "" if trouble is None else trouble.text

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
        say(
            f"warning: without --deterministic-mode a recovery of --moe-ft-strategy {kind.name} is "
            "consistent, but not bit for bit the run without the failure"
        )
    precision = site.config.precision
    if precision.lossy_parts:
        kept = ", ".join(f"{part} as {each}" for part, each in precision.lossy_parts.items())
        say(f"warning: snapshots keep {kept}: recoveries are not exact")
        if precision.is_ruinous:
            say(
                "warning: without scales second moments in so few bits are mostly 0, and training "
                "diverges after a recovery: use bf16 or a block format for exp_avg_sq"
            )


def claim_memory(site: Site) -> filelock.BaseFileLock:
    """Take this rank's place in memory as `take_place` does; warn of anything unusual."""
    lock = take_place(site)
    if not site.is_lowest_on_node:
        return lock
    if reason := why_slow(site):
        say(f"warning: {reason}")
    memory_dir = site.config.memory.memory_dir
    for other in other_jobs(memory_dir, site.job_id):
        say(f"{memory_dir} on node {site.node} also holds memory of {other}; not touched")
    return lock


def take_place(site: Site) -> filelock.BaseFileLock:
    """Make this rank's directories and take the lock that says it is alive.

    Raises:
        ConfigError: if the directory cannot be used, or another process is this rank of this job.
    """
    memory = site.config.memory
    try:
        make_root(Path(memory.memory_dir))
        return _enter(site)
    except filelock.Timeout as error:
        raise ConfigError(
            f"--moe-ft-job-id={site.job_id}: rank {site.rank} of a job of this name is "
            f"running on node {site.node} already ({error}). Give this job another name, or end the "
            "other one."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"--moe-ft-memory-dir={memory.memory_dir} with --moe-ft-job-id={site.job_id} cannot be used on "
            f"node {site.node}: {error}. It must be a directory on a tmpfs in which nobody else can replace "
            "what is yours. Name a new one, for example below /dev/shm."
        ) from error


def why_slow(site: Site) -> str:
    """Return why snapshots of this node are slow; empty if nothing is known."""
    kind = file_system_type(site.node_dir)
    if kind in ("tmpfs", "ramfs", "hugetlbfs"):
        return ""
    return (
        f"--moe-ft-memory-dir={site.config.memory.memory_dir} is on {kind or 'an unknown file system'}"
        f" on node {site.node}, not on tmpfs: snapshots are no faster than that"
    )


def _enter(site: Site) -> filelock.BaseFileLock:
    """Make the directories of this rank, and return its lock, taken.

    Raises:
        filelock.Timeout: if another process keeps it.
        OSError: if the directories cannot be made, or are not ours.
    """
    deadline_s = time.monotonic() + _OLD_START_S
    lock = alive_lock(site.node_dir, site.rank)
    while True:
        try:
            # Until the lock is taken, nobody may take the job for dead and remove it.
            with entered_job(site.node_dir.parent, timeout_s=_OLD_START_S):
                make_private(site.node_dir)
                lock.acquire(blocking=False)
                return lock
        except (filelock.Timeout, FileNotFoundError):  # an older start's, or just removed
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_CLAIM_POLL_S)


def check_memory(site: Site, peers: Sequence[tuple[int, ...]]) -> None:
    """Check that there is room for the memory that regions and replicas will take; raise as `check_room`."""
    regions = num_regions(persists=site.config.storage.persists)
    needed = plan_node_memory(site.topology, peers, regions, NUM_REPLICA_REGIONS)[site.node]
    check_room(site, needed)


def check_room(site: Site, needed: int) -> None:
    """Compare the bytes that the job will take on this node with the limit and the file system.

    Raises ConfigError if it is too much for either.
    """
    limit = site.config.memory.host_memory_limit_bytes
    memory, parts = site.config.memory, ["snapshots", "replicas"]
    remedy = "Lower --moe-ft-replication-factor, leave out --moe-ft-persist-dir, or use more ranks"
    if memory.upstream_log:
        logs = sum(info.boundary_bytes for info in site.topology.on_node(site.node))
        parts.append(f"boundary logs ({size_text(logs)})")
        remedy = f"Leave out --moe-ft-upstream-log. {remedy}"
    if memory.breakpoints:
        parts.append("breakpoints")
        remedy = f"Leave out --moe-ft-breakpoints. {remedy}"
    named = f"{', '.join(parts[:-1])} and {parts[-1]}"
    what = f"{named} take {size_text(needed)} on node {site.node}"
    remedy = f"{chosen(site.config).memory_remedy} {remedy}".lstrip()
    if limit is not None and needed > limit:
        raise ConfigError(
            f"--moe-ft-host-memory-limit={site.config.memory.host_memory_limit}: {what}, more than "
            f"the limit. Raise it if the node has the memory. {remedy}."
        )
    free = shutil.disk_usage(memory.memory_dir).free + measure(site.node_dir)[0]
    if site.is_lowest_on_node and needed > free:
        raise ConfigError(
            f"--moe-ft-memory-dir={memory.memory_dir}: {what}, and its file system has "
            f"{size_text(free)} for them. Enlarge it (mount -o remount,size=...). {remedy}."
        )
