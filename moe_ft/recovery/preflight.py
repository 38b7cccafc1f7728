"""What is checked and prepared on a machine before anything is recovered: directories, locks, memory, room.

Every check raises a ConfigError with the flag, the value, the rule and the remedy; recovery/session.py runs
them on all ranks and raises what one of them raises.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import size_text
from moe_ft.engine.job_directory import entered_job
from moe_ft.engine.memory import holds
from moe_ft.engine.private_files import make_private, make_root
from moe_ft.engine.regions import file_system_type, rank_and_holder
from moe_ft.errors import ConfigError
from moe_ft.format.files import Start
from moe_ft.planning.host_memory import NUM_REPLICA_REGIONS, num_regions
from moe_ft.planning.placement import plan_node_memory, sources_of
from moe_ft.recovery.job_memory import alive_lock, measure, other_jobs
from moe_ft.strategies.registry import chosen
from moe_ft.topology import Topology

_CLAIM_POLL_S = 0.05
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


def warn_of_inexactness(site: Site, *, is_deterministic: bool) -> None:
    """Say which settings make recoveries less than bit for bit exact.

    Args:
        site: this rank's place.
        is_deterministic: whether an iteration that is run again computes the same bits.
    """
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
    """Make this rank's directories and take the lock that says it is alive; warn of what is odd there.

    Raises:
        ConfigError: if the directory cannot be used, or another process is this rank of this job.
    """
    memory = site.config.memory
    try:
        make_root(Path(memory.memory_dir))
        lock = _take_place(site)
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


def _take_place(site: Site) -> filelock.BaseFileLock:
    """Return the lock of this rank, taken, in directories that are made and ours.

    Raises:
        filelock.Timeout: if another process keeps it.
        OSError: if the directories cannot be made, or are not ours.
    """
    deadline_s = time.monotonic() + _OLD_START_S
    lock = alive_lock(site.node_dir, site.rank)
    while True:
        try:
            # Meanwhile nobody can find the job dead and remove it.
            with entered_job(site.node_dir.parent, timeout_s=_OLD_START_S):
                make_private(site.node_dir)
                lock.acquire(blocking=False)
                return lock
        except (filelock.Timeout, FileNotFoundError):  # an older start's, or just removed
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_CLAIM_POLL_S)


def check_memory(site: Site, peers: Sequence[tuple[int, ...]]) -> None:
    """Compare the memory that regions and replicas will take with the limit and the file system.

    Raises:
        ConfigError: if it is too much for either.
    """
    regions = num_regions(persists=site.config.storage.persists)
    needed = plan_node_memory(site.topology, peers, regions, NUM_REPLICA_REGIONS)[site.node]
    limit = site.config.memory.host_memory_limit_bytes
    what = f"snapshots and replicas take {size_text(needed)} on node {site.node}"
    remedy = "Lower --moe-ft-replication-factor, leave out --moe-ft-persist-dir, or use more ranks"
    remedy = f"{chosen(site.config).memory_remedy} {remedy}".lstrip()
    if limit is not None and needed > limit:
        raise ConfigError(
            f"--moe-ft-host-memory-limit={site.config.memory.host_memory_limit}: {what}, more than "
            f"the limit. Raise it if the node has the memory. {remedy}."
        )
    free = shutil.disk_usage(site.node_dir).free + measure(site.node_dir)[0]
    if site.is_lowest_on_node and needed > free:
        raise ConfigError(
            f"--moe-ft-memory-dir={site.config.memory.memory_dir}: {what}, and its file system has "
            f"{size_text(free)} for them. Enlarge it (mount -o remount,size=...). {remedy}."
        )


def make_room(
    site: Site, peers: Sequence[tuple[int, ...]], restored: tuple[Start, int] | None
) -> None:
    """Remove what other placements have left on this node and the recovery does not rest on.

    What it rests on stays until a newer snapshot is complete and at its peers.

    Args:
        site: this rank's place.
        peers: of every rank, now.
        restored: writer and iteration of the state that was recovered, None after a fresh start.
    """
    here = {info.rank for info in site.topology.on_node(site.node)}
    for directory in site.node_dir.iterdir() if site.is_lowest_on_node else ():
        owner, holder = rank_and_holder(directory.name)
        is_used = holder in here and (owner == holder or owner in sources_of(peers, holder or 0))
        if owner is None or is_used or directory.is_symlink():
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
