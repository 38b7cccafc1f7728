"""Operations of the stand-in for NCCL, and the communicators that run them: nccl.py has the rules."""

import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, override

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from tests.device.queues import Device, Operation, Stream, poison
from tests.device.tensors import LateTensor

CONFLICT = "late device:"
NOTICES = "LATE_NCCL_NOTICES"  # variable: 1 if communicators find out that a rank has died
_LATEST_S = (0.0, 0.0, 0.002)  # until an operation begins, at most
Tensors = Sequence[torch.Tensor]
# Begins a collective of gloo on private copies, which it gets by the tensors they are of.
Call = Callable[[Any, Callable[[Any], Any]], Sequence[Any]]


class Collective:
    """One operation of a communicator.

    Attributes:
        has_ended: set when it has run, or was aborted.
        has_result: whether it has run.
        parts: those of a batch.
    """

    def __init__(self, name: str, calls: Sequence[Call], reads: Tensors, writes: Tensors) -> None:
        self.name, self.calls = name, list(calls)
        self.reads, self.writes = list(reads), list(writes)
        self.parts: Sequence[Collective] = ()
        self.has_ended, self.has_result = threading.Event(), False
        self.begun_s = time.monotonic()
        self._lock = threading.Lock()

    @classmethod
    def of_batch(cls, parts: Sequence["Collective"]) -> "Collective":
        """Return one that runs others together."""
        calls, reads, writes = (
            [each for part in parts for each in getattr(part, name)]
            for name in ("calls", "reads", "writes")
        )
        made = cls("batch", calls, reads, writes)
        made.parts = parts
        return made

    def begin(self) -> None:
        """Begin to run."""
        for each in self.parts:
            each.begin()

    def run(self, inner: Any) -> None:
        """Exchange. Raises RuntimeError if a rank has died."""
        self.begin()
        copies = {id(each): numbers_of(each).clone() for each in [*self.reads, *self.writes]}
        for work in [work for call in self.calls for work in call(inner, partial(_copies, copies))]:
            work.wait()
        with self._lock:
            if not self.has_ended.is_set():
                for each in self.writes:
                    with torch.no_grad():
                        numbers_of(each).copy_(copies[id(each)])
                self.has_result = True
                self.has_ended.set()

    def abort(self) -> None:
        with self._lock:
            self.has_ended.set()


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.content if isinstance(tensor, LateTensor) else tensor.detach()


def _copies(copies: dict[int, torch.Tensor], wanted: Any) -> Any:
    if isinstance(wanted, torch.Tensor):
        return copies[id(wanted)]
    return [_copies(copies, each) for each in wanted]


class Watched(Collective):
    """One on plain tensors: outputs are poison until it has run, and inputs are to stay as they are."""

    def __init__(self, name: str, calls: Sequence[Call], reads: Tensors, writes: Tensors) -> None:
        super().__init__(name, calls, reads, writes)
        self._given = {id(each): numbers_of(each).clone() for each in reads}
        for each in writes:
            poison(numbers_of(each))
        self._seen = {id(each): numbers_of(each).clone() for each in [*reads, *writes]}

    @override
    def begin(self) -> None:
        if not all(
            _same(numbers_of(each), self._seen[id(each)]) for each in [*self.reads, *self.writes]
        ):
            sys.stderr.write(f"{CONFLICT} {self.name} met a tensor that was changed too early\n")
            sys.stderr.flush()
        for each in self.reads:  # what lay under the poison, where it is an output too
            with torch.no_grad():
                numbers_of(each).copy_(self._given[id(each)])

    @override
    def abort(self) -> None:
        if not self.has_ended.is_set():
            for each in self.writes:
                poison(numbers_of(each))
        super().abort()


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


class Communicator:
    """Connections between some ranks, and the thread that runs their operations in order."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Connect, which waits for all ranks."""
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout, options._devices = timeout, [gloo_device()]
        self._inner = dist.ProcessGroupGloo(store, rank, size, options)
        self._random = random.Random(f"{rank} {size}")
        self._waiting: queue.SimpleQueue[Collective] = queue.SimpleQueue()
        self._pending: dict[Collective, None] = {}
        self._streams: dict[int, Stream] = {}
        self._lock = threading.Lock()
        self.is_aborted = False
        self.error = ErrorType.SUCCESS
        threading.Thread(target=self._work, name="late-nccl", daemon=True).start()

    def begin(self, operation: Collective) -> None:
        """Have the thread run an operation."""
        with self._lock:
            self._pending[operation] = None
            if self.is_aborted:
                operation.abort()
        self._waiting.put(operation)

    def stream(self, device: Device) -> Stream:
        """Return the stream of asynchronous operations on a late device."""
        return self._streams.setdefault(id(device), Stream(device))

    def abort(self) -> None:
        """End all operations as they are."""
        with self._lock:
            self.is_aborted = True
            for each in self._pending:
                each.abort()

    def look(self, timeout: timedelta) -> None:
        """Find an operation that has taken too long."""
        late_s = time.monotonic() - timeout.total_seconds()
        with self._lock:
            found = [each for each in self._pending if each.begun_s < late_s]
            if any(not each.has_ended.is_set() for each in found) and not self.is_aborted:
                self.error = ErrorType.TIMEOUT

    def _work(self) -> None:
        while not self.is_aborted:
            operation = self._waiting.get()
            time.sleep(self._random.uniform(0.0, self._random.choice(_LATEST_S)))
            try:
                operation.run(self._inner)
            except RuntimeError:  # a rank has died: nothing moves any more
                if os.environ.get(NOTICES) == "1":
                    self.error = ErrorType.REMOTE_ERROR
                return
            with self._lock:
                del self._pending[operation]


@cache
def gloo_device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


class LateWork(dist.Work):
    """Handle of an operation that was given to the device."""

    def __init__(
        self, operation: Collective, queued: Operation | None, device: Device | None, kept: Any
    ) -> None:
        super().__init__()
        self._operation, self._queued, self._device, self._kept = operation, queued, device, kept

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._device is None:
            self._operation.has_ended.wait()
        else:
            self._device.queue("wait for NCCL", lambda: None, after=[self._queued])
            if self._operation.name == "barrier":
                self._device.current.synchronize()
        self._kept = None
        return True

    @override
    def is_completed(self) -> bool:
        return self._operation.has_ended.is_set()

    @override
    def synchronize(self) -> None:
        self.wait()
