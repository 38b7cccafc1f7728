"""Processes that a rank starts, such as Megatron's checkpoint writers: they end with the rank, or soon after.

Megatron's checkpoint writers wait for work forever. The writers of a killed rank would keep its memory and
its output pipe, and a launcher waits for the pipe to close. Forked ones, such as those that load data, also
keep its connections open, whose end tells other ranks that it is dead: they are killed with it.

SLURM sends SIGTERM to all processes of a job. A rank uses the time to save its state, and would fail if what
loads its data had ended: those processes obey the rank alone.

A fork does not collect what was garbage in the rank. That may be a process group, of a failed iteration say,
whose end waits for threads which a fork does not have.
"""

import gc
import importlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from moe_ft.processes import follow_parent, has_ended

RANK_POLL_S = 1.0
_LOADING = "_worker_loop"  # of torch's DataLoader
_start, _bootstrap = BaseProcess.start, BaseProcess._bootstrap  # type: ignore[attr-defined]
_watching_pid = 0  # the process in which a thread watches; a fork has this and not the thread


def end_children_with(rank_pid: int, *, on_cpu: bool) -> None:
    """Have what multiprocessing starts from here on end soon after the rank, and what that starts too.

    Args:
        on_cpu: whether CUDA calls of new interpreters must be answered by the CPU, as those of the rank are.
    """

    def start(process: Any) -> None:
        process.moe_ft_rank = _Follower(rank_pid, on_cpu)  # is pickled with it, if anything is
        # The kernel takes the end of a thread for that of the parent.
        process.moe_ft_may_die = threading.current_thread() is threading.main_thread()
        process.moe_ft_collects = gc.isenabled()
        gc.disable()  # until the fork has put aside what it inherits
        try:
            _start(process)
        finally:
            if process.moe_ft_collects:
                gc.enable()

    def bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        gc.freeze()
        if process.moe_ft_collects:
            gc.enable()
        is_fork = _watching_pid != os.getpid()  # what is pickled watches already
        if process.moe_ft_may_die and is_fork:
            follow_parent(process._parent_pid)
        _watch(rank_pid, loads_data=getattr(process._target, "__name__", "") == _LOADING)
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


def _watch(rank_pid: int, *, loads_data: bool = False) -> None:
    global _watching_pid
    if _watching_pid == os.getpid():
        return
    _watching_pid = os.getpid()
    signals = {signal.SIGTERM} if loads_data else set[signal.Signals]()
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def watch() -> None:
        while not has_ended(rank_pid):
            told = signal.sigtimedwait(signals, RANK_POLL_S)
            if told is not None and told.si_pid == os.getppid():
                os._exit(0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
