"""pretrain_gpt_moe.py whose ranks die once each, in a place between two iterations (DYING_IN).

DYING holds faults such as kill:3@4: rank 3 is killed when it comes to that place for the fourth time: a step
of its evaluations, the beginning or the end of its log lines, or the decision to exit. A replacement counts
from 1 again. With PINS_DIR, ranks write there what they pin and touch.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from megatron.training import ft_integration, training

import pretrain_gpt_moe
from megatron.fault_tolerance.seams.patching import Patches
from tests.pins import count_in_job

COMPILES = "Megatron compiles beforehand"
_num_begun = 0


def die_once(*_: object) -> None:
    """Die where a fault is due, unless a process before this one has."""
    global _num_begun
    _num_begun += 1
    for fault in os.environ["DYING"].split():
        kind, place = fault.split(":")
        marker = Path(f"{os.environ['DYING_MARKER']}_{place}")
        if place != f"{os.environ['RANK']}@{_num_begun}" or marker.exists():
            continue
        marker.touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # hang
            time.sleep(3600)


def log_and_die(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Log an iteration, and die then where a fault is due."""
    result = original(*args, **kwargs)
    die_once()
    return result


def compile_and_say(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile what Megatron compiles before it trains, and say so."""
    print(f"{COMPILES} on rank {os.environ['RANK']}", flush=True)
    return original(*args, **kwargs)


def die_or_call(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Die where a fault is due, or do what the loop does there."""
    die_once()
    return original(*args, **kwargs)


if __name__ == "__main__":
    with Patches() as patches:
        patches.wrap(training, "set_jit_fusion_options", compile_and_say)
        if folder := os.environ.get("PINS_DIR"):
            count_in_job(patches, Path(folder))
        match os.environ["DYING_IN"]:
            case "evaluation":
                patches.set(ft_integration, "on_eval_step_start", die_once)
            case "log":
                patches.wrap(training, "training_log", die_or_call)
            case "logged":
                patches.wrap(training, "training_log", log_and_die)
            case "exit":
                patches.wrap(training, "checkpoint_and_decide_exit", die_or_call)
        pretrain_gpt_moe.main()
