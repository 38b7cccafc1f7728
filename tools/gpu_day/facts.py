"""Facts about the machine, on which every figure of a day depends."""

import importlib.metadata
import os
import shutil
import subprocess
import sys

import torch

from tools.gpu_day.results import Watch, note

_COMMANDS = (
    "uname -a; nproc; free -g | head -2; df -h /dev/shm /tmp; cat /proc/loadavg",
    "nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version,pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,clocks.sm,clocks.mem,persistence_mode,"
    "mig.mode.current --format=csv",
    "lscpu | grep -E 'Model name|NUMA|Thread|Core|Socket|L3'",
    "head /sys/kernel/mm/transparent_hugepage/*enabled; grep -E 'Huge|Shmem' /proc/meminfo; ulimit -l",
    "mount | grep -E 'shm|/tmp| / '; which gcc g++ nvcc make ninja py-spy",
    "git log -1 --format='commit %h of %ci'",
)
_PACKAGES = (
    *("torch", "triton", "numpy", "megatron-core", "msgspec", "xxhash", "transformers", "pytest"),
    *("nvidia-nccl-cu13", "transformer-engine", "apex", "py-spy"),
)
_LEAST_MEMORY = 40 << 30  # of /dev/shm, for all steps


def main() -> None:
    """Print all facts; leave the most important ones as the result."""
    for command in _COMMANDS:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
        print(f"$ {command}\n{done.stdout}", flush=True)
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    print(versions, flush=True)
    memory = shutil.disk_usage("/dev/shm")
    parts = [
        f"torch {torch.__version__}, triton {versions['triton']}, megatron-core {versions['megatron-core']}",
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, /dev/shm {memory.total >> 30} GiB, "
        f"Python {sys.version.split()[0]}",
    ]
    if torch.cuda.is_available():
        with Watch() as watch:
            torch.zeros(1, device="cuda")
        free, total = torch.cuda.mem_get_info()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        name = torch.cuda.get_device_name()
        parts.append(
            f"{torch.cuda.device_count()} x {name}, {free >> 30} of {total >> 30} GiB free, "
            f"NCCL {nccl}, context in {watch.s:.1f} s"
        )
        if memory.total < _LEAST_MEMORY:
            parts.append("/dev/shm IS SMALL: jobs may find no memory")
    else:
        parts.append("no GPU")
    note("facts", ", ".join(reversed(parts)), versions=versions)


if __name__ == "__main__":
    main()
