"""pretrain_gpt_moe.py whose ranks die once each, in an evaluation or in a log line (DYING_IN).

DYING holds faults such as kill:3@4: rank 3 is killed where the fourth step of its evaluations begins, or its
fourth log line. A replacement counts from 1 again.
"""

import os
import signal
import time
from pathlib import Path

from megatron.training import ft_integration, one_logger_utils

import pretrain_gpt_moe

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


if __name__ == "__main__":
    if os.environ["DYING_IN"] == "evaluation":
        ft_integration.on_eval_step_start = die_once
    else:
        one_logger_utils.track_app_tag = die_once  # called where a log line begins
    pretrain_gpt_moe.main()
