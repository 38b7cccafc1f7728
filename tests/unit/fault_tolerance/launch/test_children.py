"""Processes that a rank starts end soon after the rank, and new interpreters have its device."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from megatron.fault_tolerance.launch import children
from tests.shares import share_of
from tests.waiting import wait_for

DEADLINE_S = 120.0
_context = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def unwrapped() -> Iterator[None]:
    yield
    BaseProcess.start = children._start  # type: ignore[method-assign]
    BaseProcess._bootstrap = children._bootstrap  # type: ignore[attr-defined]


def _pass_on(methods: tuple[str, ...], folder: Path) -> None:
    """Start the next process by the next method; the last one leaves its process id in the folder."""
    if methods:
        context: Any = multiprocessing.get_context(methods[0])
        context.Process(target=_pass_on, args=(methods[1:], folder)).start()
    else:
        (folder / str(os.getpid())).touch()
    time.sleep(DEADLINE_S)


def _be_a_rank(methods: tuple[str, ...], folder: Path) -> None:
    children.end_children_with(os.getpid(), on_cpu=False)
    _pass_on(methods, folder)


METHODS = [("fork",), ("spawn",), ("spawn", "fork"), ("fork", "fork")]


@pytest.mark.parametrize("methods", share_of(METHODS, ("spawn", "fork")))
def test_worker_ends_soon_after_its_rank_however_it_was_started(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    rank = _context.Process(target=_be_a_rank, args=(methods, tmp_path))
    rank.start()
    (left,) = wait_for(lambda: [*tmp_path.iterdir()], "the worker")
    worker = psutil.Process(int(left.name))
    time.sleep(2 * children.RANK_POLL_S)
    assert worker.is_running()
    rank.kill()
    worker.wait(DEADLINE_S)
    rank.join(DEADLINE_S)


class _Group:
    """An object like a process group: its end must not come in a fork."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._itself = folder, self

    def __del__(self) -> None:
        (self._folder / f"ended in {os.getpid()}").touch()


def _collect(folder: Path) -> None:
    has_collector = gc.isenabled()
    gc.collect()
    (folder / f"collected {has_collector} in {os.getpid()}").touch()


def _leave_a_group(folder: Path) -> None:
    children.end_children_with(os.getpid(), on_cpu=False)
    gc.collect()
    _Group(folder)
    loader = _context.Process(target=_collect, args=(folder,))
    loader.start()
    loader.join(DEADLINE_S)
    assert gc.isenabled()
    gc.collect()


def test_fork_leaves_garbage_of_its_rank_alone(tmp_path: Path) -> None:
    gc.collect()  # groups of tests before this one: their threads are here, and not in the rank
    rank = _context.Process(target=_leave_a_group, args=(tmp_path,))
    rank.start()
    rank.join(DEADLINE_S)
    one, other = sorted(each.name.split() for each in tmp_path.iterdir())
    assert one[:2] == ["collected", "True"]
    assert other == ["ended", "in", str(rank.pid)]


def _read_data(calls: "Connection[Any, Any]") -> None:
    # So that no poll explains an end, neither ours nor torch's.
    children.RANK_POLL_S = DEADLINE_S
    vars(torch.utils.data._utils.worker)["MP_STATUS_CHECK_INTERVAL"] = DEADLINE_S
    children.end_children_with(os.getpid(), on_cpu=False)
    numbers: Any = list(range(99))
    batches: Any = iter(DataLoader[int](numbers, num_workers=1, persistent_workers=True))
    calls.send(batches._workers[0].pid)
    while calls.recv():
        calls.send(int(next(batches)))


def test_process_that_loads_data_obeys_its_rank_alone_and_is_killed_with_it() -> None:
    for is_killed in (True, False):
        calls, of_rank = _context.Pipe()
        rank = _context.Process(target=_read_data, args=(of_rank,))
        rank.start()
        worker = psutil.Process(calls.recv())
        for number in range(3):
            calls.send(True)
            assert calls.recv() == number
            worker.terminate()  # as SLURM does, with all processes of a job
        if is_killed:
            rank.kill()
        else:
            calls.send(False)
        rank.join(DEADLINE_S / 2)
        worker.wait(DEADLINE_S / 2)
        assert rank.exitcode == (-signal.SIGKILL if is_killed else 0)


def _count_devices(on_cpu: bool, counts: "SimpleQueue[int]") -> None:
    children.follow(os.getppid(), on_cpu)
    device = sys.modules.get("megatron.fault_tolerance.cpu.device")
    is_cpu = device is not None and device.is_active()
    counts.put(sys.modules["torch"].cuda.device_count() if is_cpu else -1)


@pytest.mark.parametrize(("on_cpu", "count"), [(True, 1), (False, -1)])
def test_calls_to_cuda_are_answered_by_the_cpu_if_the_rank_does_so(
    on_cpu: bool, count: int
) -> None:
    context = multiprocessing.get_context("spawn")  # this process may answer calls to CUDA itself
    counts: SimpleQueue[int] = context.SimpleQueue()
    context.Process(target=_count_devices, args=(on_cpu, counts)).start()
    assert counts.get() == count
