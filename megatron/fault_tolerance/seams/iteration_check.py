"""Check of an iteration (--moe-ft-check-iterations): ranks repeat each other's forward and backward pass.

Every N iterations each replica of the model first computes the micro-batches of the next one, with its
random numbers, and then its own. Both must give the same bits in outputs of modules, gradients before they
are reduced, losses, buffers and random numbers. A faulty device does not repeat the fault of another one.
A single replica repeats its own, which finds what happens once.

If any rank differs, further runs decide who is wrong (moe_ft/planning/opinions.py). The optimizer does not
step then, and training leaves the iteration.

Before the run whose gradients the optimizer gets, others come, on own micro-batches or on those of another
rank. They reduce no gradients, and leave nothing: buffers, random numbers, metrics and what DDP counts are
put back. So the last run gives the bits that it gives without them. What the ranks exchange is data: bytes of
tensors and plain values, and nothing is unpickled.

Source: torchtitan's replay of an iteration compares one rank with itself; here others repeat it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_args

from megatron.fault_tolerance.degraded.roles import layout_of_job
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import FINALIZE, Function, Layer, Layers
from megatron.fault_tolerance.seams.traces import Trace
from moe_ft.engine import exchange
from moe_ft.errors import ConfigError
from moe_ft.format.records import RecordTensor
from moe_ft.loop.corruption import Check, Finding
from moe_ft.loop.listeners import LoopState
from moe_ft.planning.opinions import (
    Accused,
    Depth,
    IterationPart,
    accused,
    of_replica,
    replica_of,
    right_run,
    shifted,
    shifts_of,
)
from moe_ft.state import fp8_state
from moe_ft.state.packed_values import pack, unpack
from moe_ft.state.random_states import apply_rng, capture_rng, current_rng, restore_rng
from moe_ft.state.tensors import buffer_places

_SLACK_BYTES = 4096  # of texts, and of numbers whose encoding has no fixed size
_TENSOR = 1  # code of what msgspec does not know
_RECORD = msgspec.msgpack.Decoder(RecordTensor)
_DIGESTS = msgspec.json.Decoder(list[str])
_DIFFERENCES = msgspec.json.Decoder(tuple[dict[int, tuple[int, int, int]], str])
_SUMS = msgspec.msgpack.Decoder(list[int])
_SUM_BYTES = 9  # of an encoded sum at most, and of the length of the list
_MOST_CHARACTERS = 60  # of words on a place, that all ranks exchange


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

    def start(group: Any, original: Function, *args: Any, **kwargs: Any) -> Any:
        trace.note_gradients(p for bucket in group.buckets for p in bucket.params_list)
        return original(*args, **kwargs) if reduces else None

    def finalize(original: Function, *args: Any, **kwargs: Any) -> Any:
        trace.note_all_gradients()
        return original(*args, **kwargs) if reduces else None

    with trace.tracing(), Patches() as patches, Layers() as layers:
        for group in bucket_groups(model):
            patches.wrap(group, "start_grad_sync", partial(start, group))
        if not reduces:
            patches.set(get_rerun_state_machine(), "validate_result", lambda *_, **__: None)
        layers.put(Layer.CHECK, {FINALIZE: finalize}, of=config)
        yield


class IterationCheck:
    """Checks every so many iterations. Owned by the training thread.

    Attributes:
        passed: the last iteration whose check passed in this start; None before.
    """

    def __init__(self, every: int, accuse: Callable[[Finding], None], loop: LoopState) -> None:
        """Check nothing yet.

        Args:
            accuse: is called by all ranks with what was found, and raises.
            loop: while peers share micro-batches in it, replicas run different ones: nothing is checked.
        """
        self._loop = loop
        self._every = every
        self._accuse = accuse
        self.passed: int | None = None

    def install(self, layers: Layers) -> None:
        """Have iterations checked."""
        layers.put(Layer.CHECK, {"train_step": self._train_step})

    def _train_step(
        self, original: Function, forward_step: Function, *args: Any, **kwargs: Any
    ) -> Any:
        # data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func
        *others, forward_backward = args
        iteration = kwargs["iteration"]
        is_due = (iteration + 1) % self._every == 0 and not self._loop.shared
        if not is_due or isinstance(forward_backward, KnownResult):
            return original(forward_step, *args, **kwargs)
        checked = _Checked(forward_backward, args[2], args[4])

        def run(**given: Any) -> Any:
            result = checked.run(given)
            if checked.differs:
                self._accuse(checked.find(self.passed))
            return result

        result = original(forward_step, *others, run, **kwargs)
        self.passed = iteration + 1
        return result


class KnownResult:
    """Stands for forward and backward where nothing is read and computed, and nothing is to be checked."""

    def __init__(self, losses: Any) -> None:
        self._losses = losses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the losses."""
        return self._losses


class _Checked:
    """One iteration that is checked.

    Attributes:
        differs: whether results differ on any rank.
    """

    def __init__(self, forward_backward: Function, optimizer: Any, config: Any) -> None:
        self._forward_backward = forward_backward
        self._optimizer = optimizer
        self._config = config
        self._layout = layout_of_job(get_args())
        self._rank = dist.get_rank()
        self._runs: list[list[int]] = []  # sums of each, for the micro-batches of this rank
        self.differs = False

    def run(self, given: Mapping[str, Any]) -> Any:
        """Run forward and backward of another replica and then of the own; return the own result."""
        if self._runs:  # Megatron runs it again, as its own check has rejected a result
            return self._forward_backward(**given)
        model = given["model"]
        self._given = given
        self._before = Before(model)
        self._batches = Batches(given["data_iterator"])
        self._trace = Trace(
            model,
            parallel_state.get_pipeline_model_parallel_rank(),
            self._layout.num_stages,
        )
        other = self._run(1)
        self._before.restore(self._optimizer)
        with tracing(self._trace, model, self._config, reduces=True):
            result = self._forward_backward(**{**given, "data_iterator": self._batches.own()})
        self._trace.note_losses(result)
        self._runs = [self._trace.values(), other]
        self.differs = _any_rank(self._runs[0] != other)
        return result

    def _run(self, shift: int) -> list[int]:
        """Compute another replica's micro-batches, and return the sums of the run on those of this rank."""
        shift %= self._layout.num_groups
        model = self._given["model"]
        owner, computer = (shifted(self._layout, self._rank, by) for by in (shift, -shift))
        with tracing(self._trace, model, self._config, reduces=False):
            apply_rng(decode(swap(encode(current_rng()), computer, owner)))
            batches = self._batches.of_other(computer, owner)
            result = self._forward_backward(**{**self._given, "data_iterator": batches})
        self._trace.note_losses(result)
        values = self._trace.values()
        most_bytes = _SUM_BYTES * (len(values) + 1)
        swapped = swap(msgspec.msgpack.encode(values), owner, computer, most_bytes)
        return exchange.decode(swapped, _SUMS)

    def find(self, passed: int | None) -> Finding:
        """Run until it is known who is wrong, if that can be known. Called by all ranks."""
        for shift in shifts_of(self._layout)[len(self._runs) :]:
            self._before.restore(self._optimizer)
            self._runs.append(self._run(shift))
        own = [xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(each)) for each in self._runs]
        digests = exchange.meet(own, _DIGESTS)
        said = exchange.meet(self._differences(digests), _DIFFERENCES)
        depths = [
            {run: Depth(IterationPart(part), *rest) for run, (part, *rest) in each.items()}
            for each, _ in said
        ]
        words = {
            min(each.values()): text for each, (_, text) in zip(depths, said, strict=True) if each
        }
        return _finding(accused(self._layout, digests, depths), words, passed)

    def _differences(
        self, digests: Sequence[Sequence[str]]
    ) -> tuple[dict[int, tuple[int, int, int]], str]:
        """Return where each run first differs from the right one on this rank's micro-batches, and words."""
        replica = replica_of(self._layout, self._rank)
        right = right_run(of_replica(self._layout, digests, replica)) or 0
        found = {
            run: first
            for run, sums in enumerate(self._runs)
            if (first := self._trace.first_difference(self._runs[right], sums)) is not None
        }
        _, words = min(found.values(), default=(None, ""))
        depths = {run: (int(at.part), at.stage, at.number) for run, (at, _) in found.items()}
        return depths, words[-_MOST_CHARACTERS:]


def _any_rank(differs: bool) -> bool:
    device = dist.distributed_c10d._get_object_coll_device()
    flag = torch.tensor([int(differs)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _finding(found: Accused, words: Mapping[Depth, str], passed: int | None) -> Finding:
    first = min(found.depths.values())
    return Finding(
        check=Check.ITERATION,
        ranks=sorted(found.depths),
        is_decided=found.is_decided,
        where=words[first],
        since=passed,
    )
