"""Check of an iteration (--moe-ft-check-iterations): ranks repeat each other's forward and backward pass.

Every N iterations each replica of the model first computes the micro-batches of the next one, with its
random numbers, and then its own. Both must give the same bits in outputs of modules, gradients before they
are reduced, losses, buffers and random numbers. A faulty device does not repeat the fault of another one.
A single replica repeats its own, which finds what happens once.

If any rank differs, further runs decide who is wrong (moe_ft/planning/opinions.py). The optimizer does not
step then, and training leaves the iteration.

Source: torchtitan's replay of an iteration compares one rank with itself; here others repeat it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.training import get_args

from megatron.fault_tolerance.degraded.roles import layout_of_job
from megatron.fault_tolerance.seams.repeated import (
    Batches,
    Before,
    exchange_random_numbers,
    swap,
    tracing,
)
from megatron.fault_tolerance.seams.stack import Function, Layer, Layers
from megatron.fault_tolerance.seams.traces import Trace
from moe_ft.engine import exchange
from moe_ft.loop.corruption import Check, Finding
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

_DIGESTS = msgspec.json.Decoder(list[str])
_DIFFERENCES = msgspec.json.Decoder(tuple[dict[int, tuple[int, int, int]], str])
_SUMS = msgspec.msgpack.Decoder(list[int])
_SUM_BYTES = 9  # of an encoded sum at most, and of the length of the list
_MOST_CHARACTERS = 60  # of words on a place, that all ranks exchange


class IterationCheck:
    """Checks every so many iterations. Owned by the training thread.

    Attributes:
        passed: the last iteration whose check passed in this start; None before.
    """

    def __init__(self, every: int, accuse: Callable[[Finding], None]) -> None:
        """Check nothing yet.

        Args:
            accuse: is called by all ranks with what was found, and raises.
        """
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
        if (iteration + 1) % self._every or isinstance(forward_backward, KnownResult):
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
            exchange_random_numbers(computer, owner)
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
