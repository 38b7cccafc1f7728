"""The stand-in for NCCL: each of its rules, between two threads that have a late device each."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from tests.device.nccl import LateNccl
from tests.device.tensors import new
from tests.device.test_queues import late

WAIT_S = 20.0
SYNC, ASYNC = SimpleNamespace(asyncOp=False), SimpleNamespace(asyncOp=True)


class Rank:
    """One of two ranks: its backend and its device."""

    def __init__(self, store: Any, number: int) -> None:
        self.number, (self.device, _) = number, late()
        options = LateNccl.Options()
        options._timeout = timedelta(seconds=WAIT_S)
        self.backend = LateNccl(store, number, 2, options)

    def ones(self) -> Any:
        return new(self.device, torch.ones(4))

    def reduce(self, tensor: Any, *, is_async: bool = True) -> Any:
        options = dist.AllreduceOptions()
        options.asyncOp = is_async
        return self.backend.allreduce([tensor], options)

    def connect(self) -> None:
        """Make the communicator, which takes both."""
        self.reduce(self.ones()).wait()
        self.device.synchronize()


def _both(first: Callable[[Rank], Any], second: Callable[[Rank], Any]) -> list[Any]:
    """Run a function on each of two connected ranks; return what they return."""
    store = dist.HashStore()

    def run(number: int, act: Callable[[Rank], Any]) -> Any:
        rank = Rank(store, number)
        rank.connect()
        return act(rank)

    with ThreadPoolExecutor(2) as pool:
        return [
            each.result(WAIT_S)
            for each in [pool.submit(run, *p) for p in enumerate((first, second))]
        ]


def test_wait_does_not_hold_up_the_host_and_the_result_is_there_for_what_the_stream_does_next() -> (
    None
):
    has_passed = threading.Event()

    def first(rank: Rank) -> float:
        tensor = rank.ones()
        rank.reduce(tensor).wait()
        has_passed.set()
        return float(tensor.sum())

    def second(rank: Rank) -> float:
        assert has_passed.wait(WAIT_S)
        return first(rank)

    assert _both(first, second) == [8.0, 8.0]


@pytest.mark.parametrize("waits", [True, False])
def test_input_that_is_changed_before_the_wait_is_noted(*, waits: bool) -> None:
    def act(rank: Rank) -> list[str]:
        tensor = rank.ones()
        rank.device.synchronize()
        work = rank.reduce(tensor)
        if waits:
            work.wait()
        tensor.add_(1.0)
        rank.device.default.synchronize()
        rank.device.synchronize()
        return rank.device.conflicts

    assert [bool(each) for each in _both(act, act)] == [not waits] * 2


def test_operation_that_a_rank_never_enters_hangs_until_an_abort_which_raises_nothing() -> None:
    def first(rank: Rank) -> list[float]:
        tensor = rank.ones()
        rank.reduce(tensor).wait()
        threading.Timer(0.1, rank.backend.abort).start()
        found: list[float] = tensor.tolist()
        with pytest.raises(RuntimeError, match="abort"):
            rank.reduce(tensor)
        return found

    found, _ = _both(first, lambda rank: None)
    assert found not in ([1.0] * 4, [2.0] * 4)


def test_timeout_ends_nothing_and_stays_with_the_communicator() -> None:
    def first(rank: Rank) -> list[ErrorType]:
        rank.reduce(rank.ones())
        reading = threading.Thread(target=rank.device.synchronize)
        reading.start()
        before = rank.backend.get_error()
        rank.backend._set_default_timeout(timedelta(seconds=0.0))
        end_s = time.monotonic() + WAIT_S
        while (found := rank.backend.get_error()) is ErrorType.SUCCESS:
            assert time.monotonic() < end_s
        assert reading.is_alive()
        rank.backend._set_default_timeout(timedelta(seconds=WAIT_S))
        rank.backend.abort()
        reading.join()
        return [before, found, rank.backend.get_error()]

    found, _ = _both(first, lambda rank: None)
    assert found == [ErrorType.SUCCESS, ErrorType.TIMEOUT, ErrorType.TIMEOUT]


def test_sends_and_receives_of_a_batch_run_together_in_whatever_order() -> None:
    def act(rank: Rank) -> list[float]:
        given, taken, other = (
            new(rank.device, torch.full((4,), rank.number + 1.0)),
            rank.ones(),
            1 - rank.number,
        )
        rank.backend._start_coalescing(None)
        rank.backend.send([given], other, 0)
        rank.backend.recv([taken], other, 0)
        work = rank.backend._end_coalescing(None)
        assert work is not None
        work.wait()
        found: list[float] = taken.tolist()
        return found

    assert _both(act, act) == [[2.0] * 4, [1.0] * 4]
