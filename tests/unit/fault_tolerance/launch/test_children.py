"""Processes that a rank spawns end soon after the rank; those that it forks are left alone."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue

import psutil
import pytest

from megatron.fault_tolerance.launch import children

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def unwrapped() -> Iterator[None]:
    yield
    BaseProcess.start = children._start  # type: ignore[method-assign]


def _work(pids: "SimpleQueue[int]") -> None:
    pids.put(os.getpid())
    time.sleep(DEADLINE_S)


def _be_a_rank(method: str, pids: "SimpleQueue[int]") -> None:
    children.end_children_with(os.getpid())
    multiprocessing.get_context(method).Process(target=_work, args=(pids,)).start()
    time.sleep(DEADLINE_S)


@pytest.mark.parametrize(("method", "ends"), [("spawn", True), ("fork", False)])
def test_worker_ends_soon_after_its_rank_if_it_was_spawned(method: str, ends: bool) -> None:
    context = multiprocessing.get_context("spawn")
    pids: SimpleQueue[int] = context.SimpleQueue()
    rank = context.Process(target=_be_a_rank, args=(method, pids))
    rank.start()
    worker = psutil.Process(pids.get())
    time.sleep(2 * children.RANK_POLL_S)
    assert worker.is_running()
    rank.kill()
    rank.join(DEADLINE_S)
    if ends:
        worker.wait(DEADLINE_S)
    else:
        worker.kill()
