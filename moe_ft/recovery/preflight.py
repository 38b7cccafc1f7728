"""What is checked and prepared on a machine before anything is recovered: directories, locks, memory, room.

Every check raises a ConfigError with the flag, the value, the rule and the remedy; recovery/session.py runs
them on all ranks and raises what one of them raises.
"""

import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from moe_ft.config import MoeFtConfig
from moe_ft.engine.memory import NUM_REPLICA_REGIONS, holds, num_regions
from moe_ft.engine.regions import file_system_type, make_private, rank_and_holder
from moe_ft.engine.storage import LOCK_NAME, LOCK_STALE_S, Storage
from moe_ft.errors import ConfigError
from moe_ft.planning.placement import plan_node_memory, sources_of
from moe_ft.recovery.cleaning import alive_lock
from moe_ft.recovery.inventory import measure, other_jobs
from moe_ft.topology import Topology

_LOCK_POLL_S = 0.5
_OLD_START_S = 20.0  # an older start's ranks may take a moment to die


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A rank's place: which rank of which job on which node, and where its node's memory is."""

    config: MoeFtConfig
    job_id: str
    node: str
    node_dir: Path
    rank: int
    topology: Topology

    @property
    def is_lowest_on_node(self) -> bool:
        """Whether this rank does what is done once per node."""
        return self.topology.lowest_on_node(self.node).rank == self.rank


def say(line: str) -> None:
    """Print a line for the people who watch the job."""
    print(f"moe_ft: {line}", file=sys.stderr, flush=True)


def claim_memory(site: Site) -> filelock.BaseFileLock:
    """Make this rank's directories and take the lock that says it is alive; warn of what is odd there.

    Raises:
        ConfigError: if the directory cannot be used, or another process is this rank of this job.
    """
    memory = site.config.memory
    try:
        make_private(Path(memory.memory_dir))
        make_private(site.node_dir.parent)
        make_private(site.node_dir)
    except OSError as error:
        raise ConfigError(
            f"--moe-ft-memory-dir={memory.memory_dir} cannot be used on node {site.node}: {error}. "
            "Name a directory on a tmpfs that you may write to."
        ) from error
    try:
        lock = alive_lock(site.node_dir, site.rank)
        lock.acquire(timeout=_OLD_START_S)
    except (filelock.Timeout, OSError) as error:
        raise ConfigError(
            f"--moe-ft-job-id={site.job_id}: rank {site.rank} of a job of this name is "
            f"running on node {site.node} already ({error}). Give this job another name, or end the "
            "other one."
        ) from error
    if not site.is_lowest_on_node:
        return lock
    kind = file_system_type(site.node_dir)
    if kind not in ("tmpfs", "ramfs", "hugetlbfs"):
        say(
            f"warning: --moe-ft-memory-dir={memory.memory_dir} is on {kind or 'an unknown file system'}"
            f" on node {site.node}, not on tmpfs: snapshots go at the speed of that"
        )
    for other in other_jobs(memory.memory_dir, site.job_id):
        say(f"{memory.memory_dir} on node {site.node} also holds memory of {other}; not touched")
    return lock


def open_storage(site: Site) -> Storage | None:
    """Return the persist directory, None without one, after trying to write there.

    Raises:
        ConfigError: if it cannot be used, or another running job uses it.
    """
    url = site.config.storage.persist_dir
    if url is None:
        return None
    try:
        storage = Storage(url)
        if site.config.storage.persists and site.is_lowest_on_node:
            storage.make_root()
            probe = f".probe_{site.rank:05d}"
            storage.write_atomically(probe, b"moe_ft")
            storage.remove(probe)
    except Exception as error:  # fsspec raises whatever its back ends do
        raise ConfigError(
            f"--moe-ft-persist-dir={url} cannot be used on node {site.node}: "
            f"{type(error).__name__}: {error}. Name a directory that can be written, or an fsspec "
            "URL whose package is installed."
        ) from error
    if site.rank == 0 and site.config.storage.persists:
        _take_lock(site, storage)
    return storage


def _take_lock(site: Site, storage: Storage) -> None:
    """Take the persist directory; another job's lock is waited out unless that job renews it."""
    lock = storage.lock()
    if lock is not None and lock.job_id != site.job_id:
        deadline = min(time.time(), lock.heartbeat_s) + LOCK_STALE_S
        if time.time() < deadline:
            say(
                f"job '{lock.job_id}' used {storage.url} a moment ago: watching whether it is alive"
            )
        while time.time() < deadline:
            time.sleep(_LOCK_POLL_S)
            if storage.lock() not in (None, lock):
                raise ConfigError(
                    f"--moe-ft-persist-dir={storage.url} is used by job '{lock.job_id}' on {lock.host}, "
                    f"which has just renewed {LOCK_NAME}: two jobs cannot write to one directory. Name "
                    "another one, or wait until that job has ended."
                )
        say(f"taking over {storage.url} from job '{lock.job_id}', which does not run any more")
    storage.write_lock(site.job_id, "", socket.gethostname())


def check_memory(site: Site, peers: Sequence[tuple[int, ...]]) -> None:
    """Compare the memory that regions and replicas will take with the limit and the file system.

    Raises:
        ConfigError: if it is too much for either.
    """
    regions = num_regions(persists=site.config.storage.persists)
    needed = plan_node_memory(site.topology, peers, regions, NUM_REPLICA_REGIONS)[site.node]
    limit = site.config.memory.host_memory_limit_bytes
    what = f"snapshots and replicas take {needed / 2**30:.2f} GiB on node {site.node}"
    remedy = "Lower --moe-ft-replication-factor, leave out --moe-ft-persist-dir, or use more ranks"
    if site.config.strategy.strategy == "sparse":
        remedy = f"Give a shorter --moe-ft-window or --moe-ft-max-window. {remedy}"
    if limit is not None and needed > limit:
        raise ConfigError(
            f"--moe-ft-host-memory-limit={site.config.memory.host_memory_limit}: {what}, more than "
            f"the limit. Raise it if the node has the memory. {remedy}."
        )
    free = shutil.disk_usage(site.node_dir).free + measure(site.node_dir)[0]
    if site.is_lowest_on_node and needed > free:
        raise ConfigError(
            f"--moe-ft-memory-dir={site.config.memory.memory_dir}: {what}, and its file system has "
            f"{free / 2**30:.2f} GiB for them. Enlarge it (mount -o remount,size=...). {remedy}."
        )


def make_room(
    site: Site, peers: Sequence[tuple[int, ...]], restored: tuple[str, int] | None
) -> None:
    """Remove what other placements have left on this node and the recovery does not rest on.

    What it rests on stays until a newer snapshot is complete and at its peers.

    Args:
        site: this rank's place.
        peers: of every rank, now.
        restored: lineage and iteration of the state that was recovered, None after a fresh start.
    """
    here = {info.rank for info in site.topology.on_node(site.node)}
    for directory in site.node_dir.iterdir() if site.is_lowest_on_node else ():
        owner, holder = rank_and_holder(directory.name)
        is_used = holder in here and (owner == holder or owner in sources_of(peers, holder or 0))
        if owner is None or is_used:
            continue
        is_needed = False
        for data in directory.glob("region_*.safetensors"):
            index = data.with_suffix(".json")
            if restored is None or not holds(index, *restored):
                index.unlink(missing_ok=True)
                data.unlink(missing_ok=True)
            else:
                is_needed = True
        for pool in directory.glob("pool_*.safetensors") if not is_needed else ():
            pool.unlink(missing_ok=True)
