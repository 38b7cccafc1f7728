"""Memory of small jobs, as claim_memory and the engine leave it."""

import os
import time
from pathlib import Path

from moe_ft.engine.memory.job_directory import entered_job, own_directory

HOUR_S = 3600.0


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
