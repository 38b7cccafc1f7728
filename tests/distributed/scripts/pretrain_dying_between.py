"""pretrain_gpt_moe.py whose rank DYING_RANK is killed once, in an evaluation or in a log line (DYING_IN)."""

import os
import signal
from pathlib import Path

from megatron.training import ft_integration, one_logger_utils

import pretrain_gpt_moe

AT = 4  # of all iterations of evaluations, which have two; and of all log lines

_num_begun = 0


def die_once(*_: object) -> None:
    """Die where the fourth of these begins, unless a process before this one has."""
    global _num_begun
    _num_begun += 1
    marker = Path(os.environ["DYING_MARKER"])
    is_due = _num_begun == AT and not marker.exists()
    if is_due and os.environ["RANK"] == os.environ["DYING_RANK"]:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if os.environ["DYING_IN"] == "evaluation":
        ft_integration.on_eval_step_start = die_once
    else:
        one_logger_utils.track_app_tag = die_once  # called where a log line begins
    pretrain_gpt_moe.main()
