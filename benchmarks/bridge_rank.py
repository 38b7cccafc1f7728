"""One rank of benchmarks/bridge_recovery.py: Megatron-Bridge trains the model of its tests.

    python -m benchmarks.bridge_rank FOLDER KILLS [OVERRIDE ...]

The folder gets the time of each iteration. The last rank is killed after each iteration of KILLS, such as
9,19, once.
"""

import os
import signal
import sys
import time
from pathlib import Path

from megatron.fault_tolerance.launch.environment import prepare_environment

prepare_environment()  # before Bridge is imported, which takes functions of Megatron by their names

import torch.distributed as dist  # noqa: E402
from megatron.bridge.training.callbacks import Callback, CallbackContext  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.bridge.training.utils.omegaconf_utils import (  # noqa: E402
    process_config_with_overrides,
)

from tests.bridge.tiny_job import Digests, tiny_config  # noqa: E402


class Clock(Callback):  # type: ignore[misc]
    """Writes when iterations end, and kills the last rank after some of them."""

    def __init__(self, folder: Path, kills: list[int]) -> None:
        self._folder = folder
        self._kills = kills

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Note the time; the loop has not counted the iteration yet."""
        iteration, rank = context.state.train_state.step + 1, dist.get_rank()
        with (self._folder / f"{rank}.times").open("a") as times:
            times.write(f"{time.time()} {iteration}\n")
        kill = self._folder / f"kill_{iteration}"
        if iteration in self._kills and rank == dist.get_world_size() - 1 and not kill.exists():
            kill.write_text(f"{time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train as the command line says."""
    folder, kills, *overrides = sys.argv[1:]
    config = process_config_with_overrides(tiny_config(), cli_overrides=overrides)
    clock = Clock(Path(folder), [int(each) for each in kills.split(",")])
    pretrain(config, forward_step, callbacks=[clock, Digests(Path(folder))])


if __name__ == "__main__":
    main()
