"""pretrain_gpt_moe.py that counts what its process holds, each time that it has logged an iteration."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training import training

import pretrain_gpt_moe

COUNTS = "COUNTS_OF_PROCESSES"  # environment variable: a folder

_log = training.training_log


def log_and_count(*args: Any, **kwargs: Any) -> Any:
    """Log an iteration, and append descriptors, threads and resident KiB to the file of this process."""
    result = _log(*args, **kwargs)
    status = Path("/proc/self/status").read_text()
    kib = int(status.partition("VmRSS:")[2].split()[0])
    line = f"{args[3]} {_num_in('fd')} {_num_in('task')} {kib}\n"
    with (Path(os.environ[COUNTS]) / str(os.getpid())).open("a") as file:
        file.write(line)
    return result


def _num_in(folder: str) -> int:
    return len(os.listdir(f"/proc/self/{folder}"))


if __name__ == "__main__":
    log: Callable[..., Any] = log_and_count
    training.training_log = log
    pretrain_gpt_moe.main()
