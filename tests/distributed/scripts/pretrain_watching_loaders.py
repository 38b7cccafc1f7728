"""pretrain_gpt_moe.py that notes after each iteration which processes load data for its rank (LOADERS_DIR).

KILL_LOADER=RANK@ITERATION kills one of them once, when the log line of that iteration has been printed.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
from megatron.training import training

import pretrain_gpt_moe
from megatron.fault_tolerance.seams.patching import Patches

_FOLDER, _RANK = Path(os.environ["LOADERS_DIR"]), os.environ["RANK"]
# Those of torch rename themselves.
LOADER = "pt_data_worker"


def loaders() -> list[int]:
    """Return the processes that load data for this one."""
    children = psutil.Process().children()
    return sorted(each.pid for each in children if each.name() == LOADER)


def log_and_note(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Log an iteration, and note the processes."""
    result = original(*args, **kwargs)
    iteration, found = training.get_args().curr_iteration + 1, loaders()
    with (_FOLDER / f"loaders_{_RANK}").open("a") as file:
        print(json.dumps({"rank": os.getpid(), "at": iteration, "loaders": found}), file=file)
    marker = _FOLDER / "has_killed"
    if os.environ.get("KILL_LOADER") == f"{_RANK}@{iteration}" and not marker.exists():
        marker.touch()
        os.kill(found[0], signal.SIGKILL)
    return result


if __name__ == "__main__":
    with Patches() as patches:
        patches.wrap(training, "training_log", log_and_note)
        pretrain_gpt_moe.main()
