"""Streams, events and memory of a device that does everything as late as it may.

An operation is queued, and runs when somebody must wait for it, with what it comes after; or earlier, where
the seed says so. tensors.py has the tensors whose operations are queued, simulated.py a whole job.

Rules that it follows, and where they are written:

- Operations of a stream run in their order, those of two streams in any, unless an event orders them
  (CUDA C++ Programming Guide, "Streams" and "Events").
- torch's streams do not wait for the default stream, nor it for them: they are made with
  cudaStreamNonBlocking (torch, c10/cuda/CUDAStream.cpp). Each host thread has a current stream of its own,
  at first the default one (torch, "CUDA semantics").
- An event stands for what its stream had been given when it was recorded. A wait takes what it stands for
  at the call: recording it again later changes nothing. One that was never recorded stops nobody (CUDA
  Runtime API, cudaEventRecord and cudaStreamWaitEvent).
- A copy between the device and page-locked memory may go on after the call. One into pageable memory is
  complete when the call returns; one from pageable memory has been read then, as it is staged (CUDA Runtime
  API, "API synchronization behavior"). Copies of torch wait for their end unless non_blocking is set
  (torch, aten/src/ATen/native/cuda/Copy.cu).
- `to("cpu", non_blocking=True)` makes page-locked memory (torch, TensorConversions.cpp), which is not given
  away before copies that torch has queued have ended (torch, CachingHostAllocator).
- Device memory that is freed on the host may be used again at once by what is queued later on the stream on
  which it was allocated. Uses on other streams are waited for only after `record_stream` (torch,
  "Tensor.record_stream" and CUDACachingAllocator).
- Memory that is unregistered while a copy is queued: CUDA's documents do not say that this waits (CUDA
  Runtime API, cudaHostUnregister), so it must not happen.

- The current device belongs to a host thread, and is the first of the node in a new one (CUDA Runtime API,
  cudaSetDevice). Here the process's own is another one: a thread that has not set it must make no call.

Not covered: operations that overlap in time without a conflict (each is one step), CUDA graphs, several
devices in one process, memory shared by processes, unified memory.
"""

import os
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_FOLDER = os.path.dirname(__file__)
POISON = 0xA5  # each byte of what is not there yet, or no longer
_EAGER = (
    0.0,
    0.0,
    0.3,
    1.0,
)  # probability with which a stream runs its next operation, whenever one is queued
Span = tuple[int, int]  # addresses of the first byte and after the last


def span_of(tensor: torch.Tensor) -> Span:
    """Return the addresses between which all numbers of a CPU tensor are."""
    first = tensor.data_ptr()
    if not tensor.numel():
        return first, first
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in extents)
    return first, first + (last + 1) * tensor.element_size()


def poison(tensor: torch.Tensor) -> None:
    """Overwrite the numbers of a CPU tensor."""
    if tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(POISON)
    else:
        tensor.fill_(1 if tensor.dtype is torch.bool else -77)


def _meet(left: Sequence[Span], right: Sequence[Span]) -> bool:
    return any(a < d and c < b for a, b in left for c, d in right)


class Operation:
    """One queued operation.

    Attributes:
        after: operations that come before it in its stream, or that its stream waits for.
        reads, writes: what it touches.
    """

    __slots__ = ("act", "after", "is_done", "name", "reads", "stream", "writes")

    def __init__(
        self,
        name: str,
        stream: "Stream",
        act: Callable[[], None],
        reads: Sequence[Span],
        writes: Sequence[Span],
        after: Sequence["Operation | None"],
    ) -> None:
        self.is_done = False
        self.name, self.stream, self.act = name, stream, act
        self.reads, self.writes = reads, writes
        self.after = [each for each in after if each is not None and not each.is_done]

    def disturbs(self, earlier: "Operation") -> bool:
        """Return whether running now, before an operation that was queued earlier, changes a result."""
        return (
            _meet(self.writes, earlier.reads)
            or _meet(self.writes, earlier.writes)
            or _meet(self.reads, earlier.writes)
        )

    def __repr__(self) -> str:
        return f"{self.name} on {self.stream}"


class Device:
    """One device of one process.

    Attributes:
        conflicts: pairs of operations without an order that touch the same memory, and other misuse. They are
            noted when they happen, and the memory also holds wrong numbers then.
    """

    def __init__(
        self,
        seed: Hashable,
        thread: Callable[[], Hashable] = lambda: 0,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a device without work.

        Args:
            thread: returns the host thread that runs.
            pause: called when a host thread begins to wait for the device: others may run.
        """
        self._random = random.Random(f"device {seed}")
        self._thread, self._pause = thread, pause
        self._users = {thread()}  # host threads whose current device this is
        self._streams: list[Stream] = []
        self._current: dict[Hashable, Stream] = {}
        self._queued: dict[Operation, None] = {}  # in the order of the calls
        self._pinned: dict[int, int] = {}  # end by first address
        self.conflicts: list[str] = []
        self.default = Stream(self)
        self.freed = Stream(self)  # writes of those to whom memory is given that others have used

    def set_current(self, *_: Any) -> None:
        """Make this the current device of the thread that calls."""
        self._users.add(self._thread())

    def enter(self) -> None:
        """Note a call of a thread whose current device is another one. Memory may be freed on any."""
        if self._thread() not in self._users:
            frame = sys._getframe(1)
            while frame.f_code.co_filename.startswith(_FOLDER) and frame.f_back is not None:
                frame = frame.f_back
            name = frame.f_code.co_qualname
            self.conflicts.append(f"{name} runs in a thread that has not set its device")

    @property
    def current(self) -> "Stream":
        """The stream of the thread that asks."""
        self.enter()
        return self._current.get(self._thread(), self.default)

    @contextmanager
    def using(self, stream: "Stream") -> Iterator[None]:
        """Make a stream the current one of this thread for a while."""
        thread, before = self._thread(), self.current
        self._current[thread] = stream
        try:
            yield
        finally:
            self._current[thread] = before

    def add(self, stream: "Stream") -> str:
        """Take a new stream; return its name."""
        self._streams.append(stream)
        stream.eagerness = self.choose_eagerness()
        return f"stream {len(self._streams) - 1}"

    def choose_eagerness(self) -> float:
        """Return the eagerness of a new stream."""
        return self._random.choice(_EAGER)

    # Queues

    def queue(
        self,
        name: str,
        act: Callable[[], None],
        reads: Sequence[Span] = (),
        writes: Sequence[Span] = (),
        stream: "Stream | None" = None,
        after: Sequence[Operation | None] = (),
    ) -> Operation:
        """Queue an operation on a stream, by default the current one."""
        stream = stream or self.current
        operation = Operation(name, stream, act, reads, writes, [stream.last, *after])
        stream.last = operation
        self._queued[operation] = None
        for each in self._streams:
            if each.eagerness and self._random.random() < each.eagerness:
                first = next((one for one in self._queued if one.stream is each), None)
                self.run(first if each.eagerness < 1 else each.last)
        return operation

    def run(self, operation: Operation | None) -> None:
        """Run an operation, and what must come before it."""
        due = [] if operation is None else [operation]
        while due:
            first = due[-1]
            before = [each for each in first.after if not each.is_done]
            if first.is_done:
                due.pop()
            elif before:
                due.extend(before)
            else:
                due.pop()
                self._run(first)

    def _run(self, operation: Operation) -> None:
        for earlier in self._queued:
            if earlier is operation:
                break
            self._note(operation, earlier)
        del self._queued[operation]
        act, operation.act, operation.after = operation.act, _nothing, []
        operation.is_done = True
        act()

    def note_write(self, name: str, spans: Sequence[Span]) -> None:
        """Note a write that happens now, after all operations of the default stream."""
        now = Operation(name, self.default, _nothing, (), spans, ())
        for earlier in self._queued:
            self._note(now, earlier)

    def note_host_read(self, span: Span) -> None:
        """Note that the host reads its memory now."""
        self.conflicts += [
            f"the host read what {each} writes"
            for each in self._queued
            if _meet([span], each.writes)
        ]

    def _note(self, operation: Operation, earlier: Operation) -> None:
        if operation.disturbs(earlier):
            self.conflicts.append(f"{operation} did not wait for {earlier}")

    def is_used(self, span: Span) -> bool:
        """Return whether something queued touches this memory."""
        return any(_meet([span], [*each.reads, *each.writes]) for each in self._queued)

    def wait(self, operation: Operation | None) -> None:
        """Let this host thread wait for an operation."""
        self.enter()
        self._pause()
        self.run(operation)

    def synchronize(self) -> None:
        """Let this host thread wait for all streams."""
        self.enter()
        lasts = [each.last for each in self._streams]
        self._pause()
        for last in lasts:
            self.run(last)

    # Page-locked memory of the host

    def pin(self, first: int, num_bytes: int) -> None:
        self._pinned[first] = first + num_bytes

    def unpin(self, first: int) -> None:
        end = self._pinned.pop(first)
        users = [
            each for each in self._queued if _meet([(first, end)], [*each.reads, *each.writes])
        ]
        self.conflicts += [f"memory was unregistered before {each} has run" for each in users]

    def forget_pinned(self, first: int) -> None:
        """Take back page-locked memory of torch, which waits for copies."""
        self._pinned.pop(first, None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        start, end = span_of(tensor)
        return any(first <= start and end <= last for first, last in self._pinned.items())


def _nothing() -> None: ...


class Stream:
    """A stream, as `torch.cuda.Stream` looks.

    Attributes:
        last: the operation that was queued last.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.last: Operation | None = None
        self.eagerness = 0.0
        self._name = device.add(self)

    def __repr__(self) -> str:
        return self._name

    def wait_event(self, event: "Event") -> None:
        self._device.enter()
        if event.recorded is not None:
            self._device.queue("wait", _nothing, stream=self, after=[event.recorded])

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._device.wait(self.last)

    def query(self) -> bool:
        self._device.enter()
        return self.last is None or self.last.is_done


class Event:
    """An event, as `torch.cuda.Event` looks.

    Attributes:
        recorded: the last operation that it stands for.
    """

    def __init__(self, device: Device, *_: Any, **__: Any) -> None:
        self._device = device
        self.recorded: Operation | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = (stream or self._device.current).last

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current).wait_event(self)

    def synchronize(self) -> None:
        self._device.wait(self.recorded)

    def query(self) -> bool:
        self._device.enter()
        return self.recorded is None or self.recorded.is_done


class Memory:
    """Device memory that was allocated on a stream.

    When the last tensor on it is freed, whoever uses the memory next may write it: on the stream of its
    allocation, after what `record_stream` has told.
    """

    def __init__(self, device: Device, content: torch.Tensor) -> None:
        self.device, self.content, self._stream = device, content, device.current
        self.users: set[Stream] = set()

    def __del__(self) -> None:
        content = self.content
        # Without other users it is given away at once, and so before whatever its stream is given next.
        # With some the allocator looks whether they have ended, for which nothing that is queued waits.
        self.device.queue(
            "next use of freed memory",
            lambda: poison(content),
            writes=[span_of(content)],
            stream=self.device.freed if self.users else self._stream,
            after=[self._stream.last, *(each.last for each in self.users)],
        )
