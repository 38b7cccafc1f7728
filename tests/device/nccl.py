"""A stand-in for torch's NCCL backend, between real processes, with NCCL's rules and as late as they allow.

gloo moves the bytes. `late_nccl` puts it in the place of `ProcessGroupNCCL`, so that unchanged code makes its
groups, waits for them and aborts them. Rules, and where they are written:

- A call returns when the operation has been given to a stream, and no result is there (NCCL User Guide, "CUDA
  Stream Semantics"). `wait` makes the current stream wait, not the host (torch, "Synchronous and asynchronous
  collective operations"). Only that of a barrier holds up the host (torch, ProcessGroupNCCL.cpp).
- An asynchronous operation runs on the communicator's own stream, behind what the current stream had been
  given; any other on the current stream (ProcessGroupNCCL.cpp, `asyncOp`). Its tensors are kept until `wait`.
  Nobody may change an input, or use an output, before.
- Operations of one communicator run in their order, which must be the same on all ranks. Those between
  `ncclGroupStart` and `ncclGroupEnd` run together (NCCL User Guide, "Group Calls", "Point-to-point
  communication"). Sends and receives outside of a batch have a communicator for each pair of ranks
  (ProcessGroupNCCL.cpp).
- A communicator is made by its first operation. That holds up the host until all its ranks have come, and an
  abort does not reach it (NCCL User Guide, "Creating a Communicator"; ProcessGroupNCCL.cpp).
- An operation that a rank never enters, or whose rank has died, hangs until an abort. NCCL may notice a lost
  connection: only `get_error` tells (NCCL User Guide, "Asynchronous errors and error handling").
- `abort` ends what hangs or waits, without a result and without an exception: `wait` returns, and the device
  goes on with what lies in the outputs. What is begun on that communicator later raises an error with "abort"
  in its text ("ncclCommAbort"; ProcessGroupNCCL.cpp, NCCLUtils.cpp).
- Errors stay with the communicator. With TORCH_NCCL_ASYNC_ERROR_HANDLING=0 a timeout is found beside the
  threads that wait, ends nothing, and only `get_error` tells (ProcessGroupNCCL.cpp, `Watchdog`).

Tensors of the late device (tensors.py) obey all of this. Of plain tensors, which real jobs have here, an
output is poison until the operation has run, and after an abort; `wait` holds up the host, as if it always
waited for its device next. An input that was changed too early is said on standard error.

Not covered: several devices in one process, splitting, eager connections, CUDA graphs, memory that NCCL has
registered.
"""

import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any, override

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d

from tests.device.queues import Device, Operation, Stream, poison, span_of
from tests.device.tensors import CUDA, LateTensor
from tests.simulation.active import Patches

CONFLICT = "late device:"
NOTICES = "LATE_NCCL_NOTICES"  # variable: 1 if communicators find out that a rank has died
_LATEST_S = (0.0, 0.0, 0.002)  # until an operation begins, at most
_GROUP_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("allgather", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "all_to_all_single", "send", "recv", "_start_coalescing", "_end_coalescing"),
)
# Names of those that torch's backends know by others.
_OF_BACKEND = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
_Real = dist.ProcessGroupNCCL
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
        copies = {id(each): _plain(each).clone() for each in [*self.reads, *self.writes]}
        for work in [work for call in self.calls for work in call(inner, partial(_copies, copies))]:
            work.wait()
        with self._lock:
            if not self.has_ended.is_set():
                for each in self.writes:
                    with torch.no_grad():
                        _plain(each).copy_(copies[id(each)])
                self.has_result = True
                self.has_ended.set()

    def abort(self) -> None:
        with self._lock:
            self.has_ended.set()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.content if isinstance(tensor, LateTensor) else tensor.detach()


def _copies(copies: dict[int, torch.Tensor], wanted: Any) -> Any:
    if isinstance(wanted, torch.Tensor):
        return copies[id(wanted)]
    return [_copies(copies, each) for each in wanted]


class _Watched(Collective):
    """One on plain tensors: outputs are poison until it has run, and inputs are to stay as they are."""

    def __init__(self, name: str, calls: Sequence[Call], reads: Tensors, writes: Tensors) -> None:
        super().__init__(name, calls, reads, writes)
        self._given = {id(each): _plain(each).clone() for each in reads}
        for each in writes:
            poison(_plain(each))
        self._seen = {id(each): _plain(each).clone() for each in [*reads, *writes]}

    @override
    def begin(self) -> None:
        if not all(_same(_plain(each), self._seen[id(each)]) for each in [*self.reads, *self.writes]):
            sys.stderr.write(f"{CONFLICT} {self.name} met a tensor that was changed too early\n")
            sys.stderr.flush()
        for each in self.reads:  # what lay under the poison, where it is an output too
            with torch.no_grad():
                _plain(each).copy_(self._given[id(each)])

    @override
    def abort(self) -> None:
        if not self.has_ended.is_set():
            for each in self.writes:
                poison(_plain(each))
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
        options._timeout, options._devices = timeout, [_gloo_device()]
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
def _gloo_device() -> Any:
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


class LateNccl(dist.ProcessGroupGloo):
    """`ProcessGroupNCCL` of a late device. Its base only makes it a backend for torch."""

    Options: Any = _Real.Options
    alive: list["LateNccl"] = []  # torch gives back the Python object only while there is one

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        base: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        base._timeout, base._devices, base._threads = timedelta(seconds=1), [_gloo_device()], 1
        super().__init__(dist.HashStore(), 0, 1, base)  # type: ignore[call-overload]
        self._store, self._rank, self._size, self._options = store, rank, size, options
        self._communicators: dict[str, Communicator] = {}
        self._batch: list[Collective] | None = None
        self.alive.append(self)

    # What torch and the product ask a backend

    @override
    def name(self) -> str:
        return "nccl"

    @override
    def rank(self) -> int:
        return self._rank

    @override
    def size(self) -> int:
        return self._size

    @property
    @override
    def options(self) -> Any:
        return self._options

    @property
    @override
    def supports_coalescing(self) -> bool:
        return True

    @override
    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._options._timeout = timeout

    @override
    def _set_sequence_number_for_group(self) -> None: ...

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...

    @override
    def get_error(self) -> ErrorType:
        for each in self._communicators.values():
            each.look(self._options._timeout)
            if each.error is not ErrorType.SUCCESS:
                return each.error
        return ErrorType.SUCCESS

    @override
    def abort(self) -> None:
        for each in list(self._communicators.values()):
            each.abort()

    # Operations, under the names that process groups have for them

    def _give(
        self, name: str, call: Call, reads: Tensors, writes: Tensors, options: Any = None
    ) -> LateWork | None:
        is_plain = not isinstance([*reads, *writes][0], LateTensor)
        operation = (_Watched if is_plain else Collective)(name, [call], reads, writes)
        if self._batch is not None:
            self._batch.append(operation)
            return None
        is_async = options is None or options.asyncOp
        return self._queue(self._communicator("all"), operation, is_async=is_async)

    def _queue(self, by: Communicator, operation: Collective, *, is_async: bool) -> LateWork:
        if by.is_aborted:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        touched = [*operation.reads, *operation.writes]
        late = [each for each in touched if isinstance(each, LateTensor)]
        if not late:
            by.begin(operation)
            return LateWork(operation, None, None, touched)
        device = late[0].memory.device
        stream = by.stream(device) if is_async else device.current
        if is_async:
            stream.wait_stream(device.current)

        def run() -> None:
            by.begin(operation)
            operation.has_ended.wait()
            if not operation.has_result:
                for each in operation.writes:
                    poison(_plain(each))

        queued = device.queue(
            operation.name,
            run,
            reads=[span_of(_plain(each)) for each in operation.reads],
            writes=[span_of(_plain(each)) for each in operation.writes],
            stream=stream,
        )
        return LateWork(operation, queued, device, touched)

    def _communicator(self, key: str) -> Communicator:
        if key not in self._communicators:
            rank, size = self._rank, self._size
            if key != "all":
                pair = sorted(map(int, key.split(":")))
                rank, size = pair.index(self._rank), 2
            store = dist.PrefixStore(f"late {key}", self._store)
            self._communicators[key] = Communicator(store, rank, size, self._options._timeout)
        return self._communicators[key]

    def _start_coalescing(self, _: Any) -> None:
        self._batch = []

    def _end_coalescing(self, _: Any) -> LateWork | None:
        batch, self._batch = self._batch or [], None
        if not batch:
            return None
        return self._queue(
            self._communicator("all"), Collective.of_batch(batch), is_async=True
        )

    def allreduce(self, tensors: Tensors, options: Any) -> Any:
        return self._give(
            "all-reduce",
            lambda inner, own: [inner.allreduce(own(tensors), options)],
            tensors,
            tensors,
            options,
        )

    def allreduce_coalesced(self, tensors: Tensors, options: Any) -> Any:
        one = dist.AllreduceOptions()
        one.reduceOp = options.reduceOp
        return self._give(
            "all-reduces",
            lambda inner, own: [inner.allreduce([own(each)], one) for each in tensors],
            tensors,
            tensors,
            options,
        )

    def broadcast(self, tensors: Tensors, options: Any) -> Any:
        is_root = options.rootRank == self._rank
        return self._give(
            "broadcast",
            lambda inner, own: [inner.broadcast(own(tensors), options)],
            tensors if is_root else [],
            [] if is_root else tensors,
            options,
        )

    def reduce(self, tensors: Tensors, options: Any) -> Any:
        return self._give(
            "reduce",
            lambda inner, own: [inner.reduce(own(tensors), options)],
            tensors,
            tensors,
            options,
        )

    def gather(self, outputs: Any, inputs: Tensors, options: Any) -> Any:
        return self._give(
            "gather",
            lambda inner, own: [inner.gather(own(outputs), own(inputs), options)],
            inputs,
            [each for several in outputs for each in several],
            options,
        )

    def scatter(self, outputs: Tensors, inputs: Any, options: Any) -> Any:
        return self._give(
            "scatter",
            lambda inner, own: [inner.scatter(own(outputs), own(inputs), options)],
            [each for several in inputs for each in several],
            outputs,
            options,
        )

    def allgather(self, outputs: Any, inputs: Tensors, options: Any) -> Any:
        return self._give(
            "all-gather",
            lambda inner, own: [inner.allgather(own(outputs), own(inputs), options)],
            inputs,
            [each for several in outputs for each in several],
            options,
        )

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> Any:
        return self.all_gather_single_coalesced([output], [given], options)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any) -> Any:
        def call(inner: Any, own: Any) -> Sequence[Any]:
            pairs = zip(outputs, inputs, strict=True)
            return [inner._allgather_base(own(into), own(each)) for into, each in pairs]

        return self._give("all-gather", call, inputs, outputs, options)

    def reduce_scatter(self, outputs: Tensors, inputs: Any, options: Any) -> Any:
        return self._give(
            "reduce-scatter",
            lambda inner, own: [inner.reduce_scatter(own(outputs), own(inputs), options)],
            [each for several in inputs for each in several],
            outputs,
            options,
        )

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any
    ) -> Any:
        one = dist.ReduceScatterOptions()
        one.reduceOp = options.reduceOp

        def call(inner: Any, own: Any) -> Sequence[Any]:
            pairs = zip(outputs, inputs, strict=True)
            return [inner._reduce_scatter_base(own(into), own(each), one) for into, each in pairs]

        return self._give("reduce-scatter", call, inputs, outputs, options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any) -> Any:
        return self._give(
            "all-to-all",
            lambda inner, own: [inner.alltoall(own(outputs), own(inputs), options)],
            inputs,
            outputs,
            options,
        )

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, of_output: Any, of_input: Any, options: Any
    ) -> Any:
        return self._give(
            "all-to-all",
            lambda inner, own: [
                inner.alltoall_base(own(output), own(given), of_output, of_input, options)
            ],
            [given],
            [output],
            options,
        )

    def barrier(self, opts: Any) -> Any:
        work = self.allreduce([torch.zeros(1)], dist.AllreduceOptions())
        assert isinstance(work, LateWork)
        work._operation.name = "barrier"
        return work

    def send(self, tensors: Tensors, to: int, tag: int) -> Any:
        return self._exchange("send", tensors, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        return self._exchange("recv", tensors, source, tag)

    def _exchange(self, name: str, tensors: Tensors, other: int, tag: int) -> Any:
        reads, writes = (tensors, []) if name == "send" else ([], tensors)
        if self._batch is not None:
            return self._give(
                name,
                lambda inner, own: [getattr(inner, name)(own(tensors), other, tag)],
                reads,
                writes,
            )
        low, high = sorted((self._rank, other))
        place = int(other == high)  # of the other one in the pair
        is_plain = not isinstance(tensors[0], LateTensor)
        operation = (_Watched if is_plain else Collective)(
            name,
            [lambda inner, own: [getattr(inner, name)(own(tensors), place, tag)]],
            reads,
            writes,
        )
        return self._queue(self._communicator(f"{low}:{high}"), operation, is_async=True)


@contextmanager
def late_nccl() -> Iterator[None]:
    """Put the stand-in into torch.distributed, for groups that are made in this context."""
    patches = Patches()
    try:
        for module in (dist, distributed_c10d):
            patches.set(module, "ProcessGroupNCCL", LateNccl)
        for name in _GROUP_METHODS:
            patches.set(dist.ProcessGroup, name, _diverted(name))
        patches.set(dist.ProcessGroup, "_get_backend", _device_backend)
        patches.set(dist.ProcessGroup, "abort", _abort_all)
        yield
    finally:
        patches.restore()


_get_backend = dist.ProcessGroup._get_backend
_abort = dist.ProcessGroup.abort


def _device_backend(group: Any, device: torch.device) -> Any:
    """Return a backend, that of the device also for plain tensors if there is no other."""
    return _get_backend(group, CUDA if CUDA.type in _types(group) == {CUDA.type} else device)


def _types(group: Any) -> set[str]:
    return {each.type for each in group._device_types}


def _abort_all(group: Any) -> None:
    if CUDA.type not in _types(group):
        _abort(group)
    elif isinstance(backend := _get_backend(group, CUDA), LateNccl):
        backend.abort()


def _diverted(name: str) -> Callable[..., Any]:
    original = getattr(dist.ProcessGroup, name)

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        types = _types(group)
        backend = _get_backend(group, CUDA) if CUDA.type in types else None
        if isinstance(backend, LateNccl):
            return getattr(backend, name)(*args, **kwargs)
        if backend is None or "cpu" in types:
            return original(group, *args, **kwargs)
        if name.endswith("_single_coalesced"):  # of a fake backend
            single = _diverted(name.removesuffix("_coalesced"))
            return [single(group, *each, args[2]) for each in zip(*args[:2], strict=True)][-1]
        return getattr(backend, _OF_BACKEND.get(name, name))(*args, **kwargs)

    return call
