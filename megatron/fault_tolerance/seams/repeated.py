"""Forward and backward of an iteration, computed more than once from the same state.

Before the run whose gradients the optimizer gets, others may come, on own micro-batches or on those of
another rank. They reduce no gradients, and leave nothing: buffers, random numbers, metrics and what DDP
counts are put back. So the last run gives the bits that it gives without them.

What the ranks exchange is data: bytes of tensors and plain values, and nothing is unpickled.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import FINALIZE, Function, Layer, Layers
from megatron.fault_tolerance.seams.traces import Trace
from moe_ft.engine import exchange
from moe_ft.errors import ConfigError
from moe_ft.format.records import RecordTensor
from moe_ft.state import fp8_state
from moe_ft.state.packed_values import pack, unpack
from moe_ft.state.random_states import apply_rng, capture_rng, current_rng, restore_rng
from moe_ft.state.tensors import buffer_places

_SLACK_BYTES = 4096  # of texts, and of numbers whose encoding has no fixed size
_TENSOR = 1  # code of what msgspec does not know
_RECORD = msgspec.msgpack.Decoder(RecordTensor)


def swap(content: bytes, to: int, source: int, most_bytes: int | None = None) -> bytes:
    """Send bytes to a rank and return those of another one. Called by all ranks, in a ring.

    Args:
        most_bytes: that the other one may have; None: twice as many as this one. Ranks send each other what
            is alike, and uneven micro-batches differ by a sample.

    Raises:
        ExchangeError: if it names more. No memory is taken for them.
    """
    if to == dist.get_rank():
        return content
    device = dist.distributed_c10d._get_object_coll_device()

    def both(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        pair = [dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, other, source)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return other

    size = both(
        torch.tensor([len(content)], device=device), torch.zeros(1, dtype=torch.int64).to(device)
    )
    most_bytes = 2 * len(content) + _SLACK_BYTES if most_bytes is None else most_bytes
    if not 0 <= (num_bytes := int(size)) <= most_bytes:
        raise exchange.refusal(f"{num_bytes} bytes where at most {most_bytes} are expected")
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    other = both(own, torch.empty(num_bytes, dtype=torch.uint8, device=device))
    return other.cpu().numpy().tobytes()


class Batches:
    """Micro-batches of one iteration: those of this rank, each read once, and those of another rank.

    Owned by the training thread.
    """

    def __init__(self, iterators: Any) -> None:
        """Take the loop's iterator, its list of iterators, or None where this rank reads none."""
        self._several = isinstance(iterators, list)
        given = iterators if self._several else [iterators]
        self._sources = {id(each): each for each in given if each is not None}
        self._order = [None if each is None else id(each) for each in given]
        self._read: dict[int, list[Any]] = {key: [] for key in self._sources}

    def _each(self, make: Callable[[int], Iterator[Any]]) -> Any:
        made = {key: make(key) for key in self._sources}
        found = [None if key is None else made[key] for key in self._order]
        return found if self._several else found[0]

    def own(self) -> Any:
        """Return iterators over the micro-batches of this rank."""
        return self._each(self._iterate)

    def of_other(self, to: int, source: int) -> Any:
        """Return iterators over those of another rank, while each gives its own to one.

        Raises, while they are read:
            ConfigError: if a micro-batch is nothing that can be sent as data.
        """
        return self._each(
            lambda key: (decode(swap(encode(each), to, source)) for each in self._iterate(key))
        )

    def _iterate(self, key: int) -> Iterator[Any]:
        read = self._read[key]
        for number in range(1 << 62):
            if number == len(read):
                # A shallow copy: who uses a batch may take entries out of it.
                read.append(copy.copy(next(self._sources[key])))
            yield copy.copy(read[number])


def encode(value: Any) -> bytes:
    """Return a micro-batch as bytes; raises ConfigError if it holds anything but tensors and plain values."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, KeyError) as error:  # KeyError: a type of numbers that no state has
        raise ConfigError(
            "--moe-ft-check-iterations sends micro-batches to other ranks, and these hold what cannot be "
            f"sent ({error}). Have the data give tensors, numbers and texts, or leave the flag out."
        ) from error


def decode(content: bytes) -> Any:
    """Return what was encoded, with tensors on the CPU and lists for tuples."""
    return exchange.decode(content, _VALUES)


def _pack(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, torch.Tensor):
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(pack(value)))
    raise TypeError(f"objects of type {type(value).__name__}")


def _unpack(_: int, content: memoryview) -> torch.Tensor:
    return unpack(_RECORD.decode(content))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pack)
_VALUES = msgspec.msgpack.Decoder(ext_hook=_unpack)


class Before:
    """State that forward and backward change, besides gradients. Owned by the training thread."""

    def __init__(self, model: Sequence[Any]) -> None:
        """Copy it as it is now, on the device."""
        self._model = model
        self._rng = capture_rng()
        self._buffers = [
            (buffer, buffer.detach().clone())
            for module, key in buffer_places(model).values()
            if (buffer := module._buffers[key]) is not None
        ]
        extra = fp8_state.modules_with_extra_state(model)
        self._extra = [(each, fp8_state.clone_state(name, each)) for name, each in extra.items()]
        self._metrics = {
            name: each.values.clone() for name, each in get_moe_metrics_tracker().metrics.items()
        }
        self._mtp = _copied(MTPLossLoggingHelper.tracker)
        self._groups = [
            (each, each.is_first_batch, dict(each.golden_per_param_grad_ready_counts))
            for each in bucket_groups(model)
        ]

    def restore(self, optimizer: Any) -> None:
        """Put it back, with gradients of zero."""
        for chunk in self._model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        restore_rng(self._rng)
        for buffer, copied in self._buffers:
            buffer.detach().copy_(copied)
        for module, tensors in self._extra:
            fp8_state.put_back(module, tensors)
        for name, entry in get_moe_metrics_tracker().metrics.items():
            if name in self._metrics:
                entry.values.copy_(self._metrics[name])
            else:
                entry.values.zero_()
        MTPLossLoggingHelper.tracker = _copied(self._mtp)
        for group, is_first, counts in self._groups:
            group.is_first_batch, group.golden_per_param_grad_ready_counts = is_first, dict(counts)


def _copied(tracker: dict[str, Any]) -> dict[str, Any]:
    return {
        key: each.clone() if isinstance(each, torch.Tensor) else each
        for key, each in tracker.items()
    }


def bucket_groups(model: Sequence[Any]) -> list[Any]:
    """Return the groups of buckets in which DDP reduces gradients."""
    return [each for c in model for each in c.bucket_groups + c.expert_parallel_bucket_groups]


@contextmanager
def tracing(trace: Trace, model: Sequence[Any], config: Any, *, reduces: bool) -> Iterator[None]:
    """Trace what runs in this context, gradients before they are reduced.

    Args:
        reduces: whether they are; without, nothing leaves this rank but what its groups within a replica
            exchange, and Megatron's own checks of results are off.
    """

    def start(original: Function, group: Any, *args: Any, **kwargs: Any) -> Any:
        trace.note_gradients(p for bucket in group.buckets for p in bucket.params_list)
        return original(*args, **kwargs) if reduces else None

    def finalize(original: Function, *args: Any, **kwargs: Any) -> Any:
        trace.note_all_gradients()
        return original(*args, **kwargs) if reduces else None

    with trace.tracing(), Patches() as patches, Layers() as layers:
        for group in bucket_groups(model):
            patches.wrap(group, "start_grad_sync", _bound(start, group))
        if not reduces:
            patches.set(get_rerun_state_machine(), "validate_result", lambda *_, **__: None)
        layers.put(Layer.CHECK, {FINALIZE: finalize}, of=config)
        yield


def _bound(start: Function, group: Any) -> Function:
    return lambda original, *args, **kwargs: start(original, group, *args, **kwargs)


def exchange_random_numbers(to: int, source: int) -> None:
    """Draw the random numbers of another rank from now on, which draws those of a third. In a ring."""
    apply_rng(decode(swap(encode(current_rng()), to, source)))
