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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partialmethod
from typing import Any, override

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from tests.device.communicators import (
    Call,
    Collective,
    Communicator,
    LateWork,
    Tensors,
    Watched,
    gloo_device,
    numbers_of,
)
from tests.device.queues import poison, span_of
from tests.device.tensors import CUDA, LateTensor
from tests.simulation.active import Patches

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


class LateNccl(dist.ProcessGroupGloo):
    """`ProcessGroupNCCL` of a late device. Its base only makes it a backend for torch."""

    Options: Any = _Real.Options
    alive: list["LateNccl"] = []  # torch gives back the Python object only while there is one

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        base: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        base._timeout, base._devices, base._threads = timedelta(seconds=1), [gloo_device()], 1
        super().__init__(dist.HashStore(), 0, 1, base)
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
        operation = (Watched if is_plain else Collective)(name, [call], reads, writes)
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
                    poison(numbers_of(each))

        queued = device.queue(
            operation.name,
            run,
            reads=[span_of(numbers_of(each)) for each in operation.reads],
            writes=[span_of(numbers_of(each)) for each in operation.writes],
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
        return self._queue(self._communicator("all"), Collective.of_batch(batch), is_async=True)

    def _combine(self, name: str, tensors: Tensors, options: Any) -> Any:
        return self._give(
            name,
            lambda inner, own: [getattr(inner, name)(own(tensors), options)],
            tensors,
            tensors,
            options,
        )

    allreduce = partialmethod(_combine, "allreduce")
    reduce = partialmethod(_combine, "reduce")

    def _move(self, name: str, outputs: Any, inputs: Any, options: Any) -> Any:
        return self._give(
            name,
            lambda inner, own: [getattr(inner, name)(own(outputs), own(inputs), options)],
            tree_leaves(inputs),
            tree_leaves(outputs),
            options,
        )

    allgather = partialmethod(_move, "allgather")
    alltoall = partialmethod(_move, "alltoall")
    gather = partialmethod(_move, "gather")
    reduce_scatter = partialmethod(_move, "reduce_scatter")
    scatter = partialmethod(_move, "scatter")

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

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> Any:
        return self.all_gather_single_coalesced([output], [given], options)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any) -> Any:
        def call(inner: Any, own: Any) -> list[Any]:
            pairs = zip(outputs, inputs, strict=True)
            return [inner._allgather_base(own(into), own(each)) for into, each in pairs]

        return self._give("all-gather", call, inputs, outputs, options)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any
    ) -> Any:
        one = dist.ReduceScatterOptions()
        one.reduceOp = options.reduceOp

        def call(inner: Any, own: Any) -> list[Any]:
            pairs = zip(outputs, inputs, strict=True)
            return [inner._reduce_scatter_base(own(into), own(each), one) for into, each in pairs]

        return self._give("reduce-scatter", call, inputs, outputs, options)

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
        operation = (Watched if is_plain else Collective)(
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
