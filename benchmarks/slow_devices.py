"""Program of a job whose passes take a given time on a device that its processes hold in turn.

It is pretrain_gpt_moe.py. `forward_step` and `backward_step` of Megatron's schedules, one micro-batch on one
stage each, do their real work and then sleep, while they hold the device of their rank: a file lock of the
node. So a rank that shares a device is slow of itself, and ranks that share cores are not.
"""

import fcntl
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from megatron.core.pipeline_parallel import schedules

import pretrain_gpt_moe
from benchmarks.slow_stages import lasting
from megatron.fault_tolerance.seams.patching import Patches

FOLDER, FORWARD_S = "BENCHMARK_DEVICES", "BENCHMARK_FORWARD_S"


def holding(function: Callable[..., Any], seconds: float, path: Path) -> Callable[..., Any]:
    """Return a function that does the same and holds a device for so long."""
    slept = lasting(function, seconds)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with path.open("a") as device:
            fcntl.flock(device, fcntl.LOCK_EX)
            return slept(*args, **kwargs)

    return call


def main() -> None:
    """Train on this rank."""
    folder, forward_s = Path(os.environ[FOLDER]), float(os.environ[FORWARD_S])
    device = folder / f"{os.environ['MOE_FT_NODE_ID']}_{os.environ['LOCAL_RANK']}"
    with Patches() as patches:
        for name, seconds in (("forward_step", forward_s), ("backward_step", 2 * forward_s)):
            patches.set(schedules, name, holding(getattr(schedules, name), seconds, device))
        pretrain_gpt_moe.main()


if __name__ == "__main__":
    main()
