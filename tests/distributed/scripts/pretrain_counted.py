"""pretrain_gpt_moe.py that counts what its process holds, each time that it has logged an iteration.

It may wait for leave to run an iteration, so that what a test does happens between two that it knows.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training import training

import pretrain_gpt_moe

COUNTS = "COUNTS_OF_PROCESSES"  # environment variable: a folder
GATE = "GATE_OF_ITERATIONS"  # environment variable: a file with the last iteration that may run
_POLL_S = 0.02

_log = training.training_log


def log_and_count(*args: Any, **kwargs: Any) -> Any:
    """Log an iteration, and append descriptors, threads and resident KiB to the file of this process."""
    result = _log(*args, **kwargs)
    line = " ".join(map(str, (args[3], *held_by(os.getpid()))))
    with (Path(os.environ[COUNTS]) / str(os.getpid())).open("a") as file:
        file.write(f"{line}\n")
    while GATE in os.environ and int(Path(os.environ[GATE]).read_text()) <= args[3]:
        time.sleep(_POLL_S)
    return result


def held_by(pid: int) -> tuple[int, int, int]:
    """Return descriptors, threads and resident KiB of a process."""
    folder = Path(f"/proc/{pid}")
    status = (folder / "status").read_text()
    num_fds, num_threads = (len(os.listdir(folder / each)) for each in ("fd", "task"))
    return num_fds, num_threads, int(status.partition("VmRSS:")[2].split()[0])


if __name__ == "__main__":
    log: Callable[..., Any] = log_and_count
    training.training_log = log
    pretrain_gpt_moe.main()
