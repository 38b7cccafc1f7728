"""Training in which a rank is ended once in what the loop does with an iteration after its `train_step`."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training import training

import pretrain_gpt_moe

RANK, ITERATION = 1, 4
# Functions of the loop, each with the place of the iteration in its arguments.
_PLACES = {
    "log line": ("training_log", 3),
    "evaluation": ("evaluate_and_print_results", 4),
    "save": ("save_checkpoint_and_time", 0),
    "exit": ("checkpoint_and_decide_exit", 3),
}


def train_dying(place: str, folder: str, flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py."""
    name, position = _PLACES[place]
    original: Callable[..., Any] = getattr(training, name)
    marker = Path(folder) / "has_died"

    def dying(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == str(RANK) and args[position] == ITERATION and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3600)  # the thread that waits for the signal ends the process
        return original(*args, **kwargs)

    setattr(training, name, dying)
    pretrain_gpt_moe.main(flags)
