"""Check of a process's limits: locked memory, open files, core files."""

import resource
from pathlib import Path

from moe_ft.config.fields import size_text
from moe_ft.doctor.rows import Row, passed, refused, warned
from moe_ft.engine.descriptors import allow_descriptors
from moe_ft.errors import ConfigError

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
_LOCKED, _FILES, _CORES = "locked memory", "open files", "core files"


def check_limits(node: str, world_size: int, stage_size: int) -> list[Row]:
    """Return rows on the limits of this process, which are those of ranks that are started as it was.

    Args:
        world_size: ranks of the job.
        stage_size: of them, those of one pipeline stage.
    """
    return [_locked(node), _files(node, world_size, stage_size), _cores(node)]


def _locked(node: str) -> Row:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return passed(_LOCKED, node, "no limit")
    # CUDA registers host memory through its driver; InfiniBand counts what it registers.
    found = f"{size_text(limit)} (ulimit -l): NCCL over InfiniBand and pinned memory may fail"
    remedy = (
        "ulimit -l unlimited; LimitMEMLOCK=infinity of slurmd, or --ulimit memlock=-1 of docker"
    )
    return warned(_LOCKED, node, found, remedy)


def _files(node: str, world_size: int, stage_size: int) -> Row:
    try:
        allow_descriptors(world_size, stage_size)
    except ConfigError as error:
        return refused(_FILES, node, error)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"{hard} (ulimit -Hn)"
    return passed(_FILES, node, f"{limit}, enough for {world_size} ranks")


def _cores(node: str) -> Row:
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    if limit == 0:
        return passed(_CORES, node, "none are written")
    pattern = CORE_PATTERN.read_text().strip()
    what = "no limit" if limit == resource.RLIM_INFINITY else size_text(limit)
    if pattern.startswith("|"):
        return passed(_CORES, node, f"{what}; they go to {pattern[1:].split()[0]}")
    found = f"{what}, as {pattern}: a rank that dies first writes its memory, snapshots included, to disk"
    return warned(_CORES, node, found, "ulimit -c 0")
