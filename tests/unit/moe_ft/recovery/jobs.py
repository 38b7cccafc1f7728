"""Memory of small jobs, as claim_memory and the engine leave it, and the place of a rank of one."""

import os
import time
from pathlib import Path

from moe_ft.config.config import MemoryConfig, MoeFtConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.memory.job_directory import entered_job, node_directory, own_directory
from moe_ft.launches import Launch
from moe_ft.recovery.site import Site
from moe_ft.topology import RankInfo, Topology

HOUR_S = 3600.0
REGION_BYTES = 4096


def leave_job(memory_dir: Path, job_id: str, *, age_s: float = 2 * HOUR_S) -> Path:
    """Make the memory of a job that died some time ago; return its directory."""
    directory = memory_dir / job_id
    with entered_job(directory, timeout_s=1.0):
        own = own_directory(directory / "node0", 0)
        own.mkdir(parents=True)
        (own / "region_0.safetensors").write_bytes(bytes(1 << 20))
        (directory / "node0" / "rank_00000.alive").touch()
    then = time.time() - age_s
    for path in (directory, *directory.rglob("*")):
        os.utime(path, (then, then))
    return directory


def site_of(memory_dir: Path, job_id: str = "job", limit: str | None = None) -> Site:
    """Return the place of the only rank of a job."""
    info = RankInfo(rank=0, node="node", stage=0, pid=1, address=None, region_bytes=REGION_BYTES)
    return Site(
        config=MoeFtConfig(
            strategy=StrategyConfig(strategy="dense"),
            memory=MemoryConfig(memory_dir=str(memory_dir), job_id=job_id, host_memory_limit=limit),
        ),
        job_id=job_id,
        node="node",
        node_dir=node_directory(str(memory_dir), job_id, "node"),
        rank=0,
        topology=Topology(ranks=(info,)),
        launch=Launch(),
    )
