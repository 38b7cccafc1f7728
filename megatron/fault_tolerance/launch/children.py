"""Processes that a rank starts, such as Megatron's checkpoint writers: they end soon after the rank.

Megatron's checkpoint writers wait for work forever. The writers of a killed rank would keep its memory and
its output pipe, and a launcher waits for the pipe to close.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from moe_ft.processes import has_ended

RANK_POLL_S = 1.0
_start, _bootstrap = BaseProcess.start, BaseProcess._bootstrap  # type: ignore[attr-defined]
_watching_pid = 0  # the process in which a thread watches; a fork has this and not the thread


def end_children_with(rank_pid: int, *, on_cpu: bool) -> None:
    """Have what multiprocessing starts from here on end soon after the rank, and what that starts too.

    Args:
        on_cpu: whether CUDA calls of new interpreters must be answered by the CPU, as those of the rank are.
    """

    def start(process: Any) -> None:
        process.moe_ft_rank = _Follower(rank_pid, on_cpu)  # is pickled with it, if anything is
        _start(process)

    def bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        _watch(rank_pid)  # a fork; what is pickled watches already
        return _bootstrap(process, *args, **kwargs)

    for name, function in (("start", start), ("_bootstrap", bootstrap)):
        setattr(BaseProcess, name, function)


class _Follower:
    """An object whose copy in a new interpreter makes that process end soon after the rank."""

    def __init__(self, rank_pid: int, on_cpu: bool) -> None:
        self._rank = rank_pid, on_cpu

    def __reduce__(self) -> tuple[Callable[[int, bool], None], tuple[int, bool]]:
        return follow, self._rank


def follow(rank_pid: int, on_cpu: bool) -> None:
    """Make this process end soon after the rank has ended, for whatever reason."""
    if on_cpu:  # imports torch, which a process on a GPU may do without
        importlib.import_module("megatron.fault_tolerance.cpu.device").install()
    end_children_with(rank_pid, on_cpu=on_cpu)
    _watch(rank_pid)


def _watch(rank_pid: int) -> None:
    global _watching_pid
    if _watching_pid == os.getpid():
        return
    _watching_pid = os.getpid()

    def watch() -> None:
        while not has_ended(rank_pid):
            time.sleep(RANK_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
