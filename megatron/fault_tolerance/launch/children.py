"""Processes that a rank starts, such as Megatron's checkpoint writers: they end soon after the rank.

Megatron's checkpoint writers wait for work forever. The writers of a killed rank would keep its memory and
its output pipe, and a launcher waits for the pipe to close.
"""

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

RANK_POLL_S = 1.0
_start = BaseProcess.start


def end_children_with(rank_pid: int) -> None:
    """Have the processes that are spawned from here on end soon after the rank, and their children too.

    A process that is forked, without a new interpreter, is left alone.
    """

    def start(process: BaseProcess) -> None:
        vars(process)["moe_ft_rank"] = _Follower(rank_pid)  # is pickled with it
        _start(process)

    BaseProcess.start = start  # type: ignore[method-assign, assignment]


class _Follower:
    """An object whose copy in another process makes that process end soon after the rank."""

    def __init__(self, rank_pid: int) -> None:
        self._rank_pid = rank_pid

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return follow, (self._rank_pid,)


def follow(rank_pid: int) -> None:
    """End this process soon after the rank has ended, for whatever reason."""

    def watch() -> None:
        while _is_alive(rank_pid):
            time.sleep(RANK_POLL_S)
        os._exit(1)

    end_children_with(rank_pid)
    threading.Thread(target=watch, daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
