"""The boundary log of a rank: what it sends to other pipeline stages, in slots of host memory.

Each slot takes the sends of one iteration and is committed when its gradients are ready. Slots are used
again, oldest first: a replay needs the iterations from the beginning of the newest complete window on, for
which there is room (planning/boundary_log.py). Whatever fails costs the log of an iteration, never the
iteration. megatron/fault_tolerance/seams/pipeline_tap.py records, engine/boundary/reading.py reads.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from moe_ft.arithmetic import round_up
from moe_ft.engine.background import BackgroundPart, EventQueue, ThreadWorker
from moe_ft.engine.memory.regions import BoundarySlot, make_header
from moe_ft.format.boundary import BoundaryIndex, Direction, SentTensor
from moe_ft.format.encoding import FORMAT, checksum, encode
from moe_ft.format.identity import Identity
from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.state.record import CapturedNumbers
from moe_ft.state.slices import dtype_name
from moe_ft.store.extents import Extent, Reason, SizeClass, Store

_PART = BackgroundPart.BOUNDARY_LOG
_FLUSH_S = 60.0


class SendCopier:
    """Copies tensors into host memory before Megatron frees them. Owned by the training thread.

    A schedule frees an activation right after it was sent. From a GPU the copy runs on a stream of its own:
    it begins when the tensor is ready, and the allocator does not give the memory away before it has ended.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensor: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a tensor; from a GPU, only begin to, and leave the tensor free to be freed.

        Args:
            target: ``[bytes]`` in host memory; unless it is pinned, this waits until a GPU has copied.
        """
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if not source.is_cuda:
            target.copy_(source)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all copies so far; None if they have ended already."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self) -> None:
        """Wait until all copies so far have ended."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(kw_only=True, slots=True)
class _Taking:
    """The log of the iteration that runs. Owned by the training thread.

    Attributes:
        sent: so far, without checksums.
        end: bytes of the file that are filled.
    """

    slot: BoundarySlot
    extent: Extent
    bytes: torch.Tensor
    end: int
    numbers: CapturedNumbers | None
    sent: list[SentTensor] = field(default_factory=list)
    ordinals: Counter[tuple[int, Direction]] = field(default_factory=Counter)
    has_failed: bool = False


class BoundaryLog:
    """Log of one rank. Owned by the training thread; `flush` may be called by any thread."""

    def __init__(
        self,
        slots: Sequence[BoundarySlot],
        header_bytes: int,
        identity: Identity,
        rank: int,
        node: str,
        worker: ThreadWorker,
        reports: EventQueue,
        record_settings: Mapping[str, Any],
    ) -> None:
        self._header_bytes = header_bytes
        self._identity = identity
        self._rank = rank
        self._node = node
        self._worker = worker
        self._reports = reports
        self._record_settings = dict(record_settings)
        self._copier = SendCopier()
        self._extents = {Extent(SizeClass.SENDS, each): slot for each, slot in enumerate(slots)}
        self._store = Store(
            {SizeClass.SENDS: len(slots)}, lambda home: self._extents[home].invalidate()
        )
        self._commits: dict[Extent, Future[None]] = {}
        self._taking: _Taking | None = None
        self._keep_from: int | None = 0  # None: no log that is begun now will be needed
        self._awaits_window = False
        self._in_use = range(0)
        self._has_lost = False  # said once for each window

    def start(self, iteration: int, keep_from: int, *, is_in_use: bool = False) -> None:
        """Begin in memory that is open.

        Logs of earlier starts stay until their slots are needed, but for those of iterations that will run
        again.

        Args:
            is_in_use: whether the recovery of this start rests on breakpoints, to which the next one returns
                until there is a new window: what was run again must stay until then, and what comes before
                that window need not.
        """
        self._in_use = range(keep_from, iteration) if is_in_use else range(0)
        self._keep_from = None if is_in_use else keep_from
        self._awaits_window = is_in_use
        for extent, slot in self._extents.items():
            slot.iteration = self._iteration_in(slot)
            if slot.iteration is None or slot.iteration >= iteration:
                self._store.drop(extent)
        for extent in sorted(self._holding(), key=lambda each: self._extents[each].iteration or 0):
            self._store.commit(extent)
        self._worker.start()

    def _holding(self, iterations: Container[int] | None = None) -> list[Extent]:
        """Return the slots that hold or take the log of an iteration, or of one of these."""
        return [
            extent
            for extent, slot in self._extents.items()
            if slot.iteration is not None and (iterations is None or slot.iteration in iterations)
        ]

    def _iteration_in(self, slot: BoundarySlot) -> int | None:
        try:
            index = slot.index(BoundaryIndex)
        except OSError:
            return None
        is_ours = index.rank == self._rank and index.file_bytes == slot.num_bytes
        return index.iteration if is_ours else None

    def begin(self, iteration: int, numbers: CapturedNumbers | None = None) -> None:
        """Begin the log of an iteration, or begin it again, before forward and backward run.

        `numbers` are those of the state that it begins with; None if nobody knows them.
        """
        before, self._taking = self._taking, None
        if before is not None:
            self._release(before.extent)  # it was never committed
        with self._reports.catching(_PART, iteration):
            self._note_commits()
            extent = self._free_slot(iteration)
            if extent is None:
                self._tell_no_slot(iteration)
                return
            slot = self._extents[extent]
            slot.iteration = iteration
            self._taking = _Taking(
                slot=slot,
                extent=extent,
                bytes=torch.frombuffer(slot.view, dtype=torch.uint8),
                end=self._header_bytes,
                numbers=numbers,
            )

    def _note_commits(self) -> None:
        for extent in [each for each, commit in self._commits.items() if commit.done()]:
            del self._commits[extent]
            if self._extents[extent].iteration is None:
                self._release(extent)
            else:
                self._store.commit(extent)

    def _release(self, extent: Extent) -> None:
        self._extents[extent].iteration = None
        self._store.give_up([extent])

    def _free_slot(self, iteration: int) -> Extent | None:
        """Return the slot for an iteration: its own, one that is empty, or the one with the oldest log."""
        own = self._holding({iteration})
        if any(extent in self._commits for extent in own):
            return None  # two would hold it
        in_use = self._holding(self._in_use)
        self._store.keep(Reason.REPLAY, [extent for extent in in_use if extent not in own])
        for extent in own:
            self._store.drop(extent)
        free = self._store.free(SizeClass.SENDS)
        oldest = self._extents[free[0]].iteration if free else None
        if oldest is not None and self._is_needed(oldest):
            self._tell_loss(oldest, iteration)
        return self._store.take(SizeClass.SENDS)[0] if free else None

    def _is_needed(self, iteration: int) -> bool:
        return self._keep_from is not None and iteration >= self._keep_from

    def _tell_no_slot(self, iteration: int) -> None:
        if self._commits:
            reason = "the logs of earlier iterations are still being written: it gets none"
            self._reports.degraded(_PART, iteration, reason)
        elif self._is_needed(iteration):
            self._tell_loss(iteration, iteration)

    def _tell_loss(self, lost: int, iteration: int) -> None:
        if self._has_lost:
            return
        self._has_lost = True
        if self._in_use:
            reason = (
                f"the logs of iterations {self._in_use.start} to {self._in_use.stop - 1}, which were run "
                f"again, stay until there is a new window: there is no room for the log of iteration {lost}"
            )
            self._reports.skipped(_PART, iteration, reason)
            return
        reason = (
            f"no window was completed in time: the log of iteration {lost} is overwritten, so that a "
            "stage cannot be replayed alone until the next window is complete"
        )
        self._reports.degraded(_PART, iteration, reason)

    def record(self, neighbour: int, direction: Direction, tensor: torch.Tensor) -> None:
        """Copy a tensor that is being sent; it may be freed or overwritten afterwards."""
        taking = self._taking
        if taking is None or taking.has_failed:
            return
        iteration = taking.slot.iteration or 0
        with self._reports.catching(_PART, iteration, self._give_up):
            start = round_up(taking.end, ALIGNMENT_BYTES)
            end = start + tensor.numel() * tensor.element_size()
            if end > taking.slot.num_bytes:
                reason = (
                    f"the iteration sends more than the {taking.slot.num_bytes} bytes that were computed "
                    "for it: it gets no log"
                )
                self._reports.degraded(_PART, iteration, reason)
                self._give_up()
                return
            self._copier.copy(tensor, taking.bytes[start:end])
            key = neighbour, direction
            entry = SentTensor(
                neighbour=neighbour,
                direction=direction,
                ordinal=taking.ordinals[key],
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                offset=start,
                checksum="0" * 16,
            )
            taking.sent.append(entry)
            taking.ordinals[key] += 1
            taking.end = end

    def _give_up(self) -> None:
        assert self._taking is not None
        self._taking.has_failed = True

    def end(self) -> None:
        """Have the log of the iteration committed: it sends nothing more. Again does nothing."""
        taking, self._taking = self._taking, None
        if taking is None:
            return
        if taking.has_failed:
            self._release(taking.extent)
            return
        commit = partial(self._commit, taking, self._copier.mark())
        self._commits[taking.extent] = self._worker.submit(commit)

    def _commit(self, taking: _Taking, copied: torch.cuda.Event | None) -> None:
        # On the worker.
        slot = taking.slot
        iteration = slot.iteration or 0

        def fail() -> None:
            slot.iteration = None  # the training thread gives the slot up

        with self._reports.catching(_PART, iteration, fail):
            if copied is not None:
                copied.synchronize()
            content = slot.view
            sent = tuple(_with_checksum(each, content) for each in taking.sent)
            header = make_header(sent, self._header_bytes, slot.num_bytes)
            index = BoundaryIndex(
                format=FORMAT,
                identity=self._identity,
                rank=self._rank,
                node=self._node,
                iteration=iteration,
                file=slot.data_path.name,
                file_bytes=slot.num_bytes,
                header_bytes=len(header),
                header_checksum=checksum(header),
                sent=sent,
                numbers=msgspec.UNSET if taking.numbers is None else taking.numbers.encode(),
                record_settings=self._record_settings,
            )
            slot.mapping[: len(header)] = header
            slot.commit(encode(index), iteration)

    def note_window(self, iteration: int) -> None:
        """Note that a window begins at an iteration that has not run yet.

        If it is the first one after a recovery from breakpoints, no earlier log will be needed.
        """
        if self._awaits_window:
            self._keep_from = iteration

    def keep(self, iteration: int) -> None:
        """Note that only the logs from an iteration on are needed: a window that begins there is complete."""
        self._keep_from = iteration
        self._in_use = range(0)
        self._has_lost = False
        self._awaits_window = False

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until everything that has ended is committed; return False if that takes too long."""
        return not wait([*self._commits.values()], timeout_s).not_done

    def close(self, timeout_s: float) -> None:
        """Commit what has ended, and end the worker. The memory stays.

        Copies of an iteration that a failure has cut short end, too: their target is unmapped next.
        """
        self._taking = None
        self._worker.submit(self._copier.wait)
        self._worker.close(timeout_s)


def _with_checksum(sent: SentTensor, content: memoryview) -> SentTensor:
    data = content[sent.offset : sent.offset + sent.num_bytes]
    return msgspec.structs.replace(sent, checksum=checksum(data))
