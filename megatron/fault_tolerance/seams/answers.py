"""Answers to collectives of the whole job, for stages that run an iteration again alone.

Megatron's code runs as it is. A collective on one of a few tensors is answered from the numbers of the
iteration: which gradients are not finite, and the number of tokens. Any other one that would reach a rank
outside raises an error, since nobody would answer it. Point-to-point transfers are seams/pipeline_tap.py's.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import UnrecoverableError
from moe_ft.format.records import JobNumbers
from moe_ft.state.tensors import inner_optimizers

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)

Function = Callable[..., Any]


@contextmanager
def answering(
    optimizer: Any, config: Any, numbers: JobNumbers, ranks: frozenset[int]
) -> Iterator[None]:
    """Have an iteration answered that some ranks run again alone.

    Args:
        optimizer: Megatron's outermost.
        config: of the model.
        numbers: of the state that the iteration ends with.
        ranks: that run the iteration together.
    """
    answers = _Answers(optimizer, numbers, ranks)
    with Patches() as patches:
        for name in _COLLECTIVES:
            patches.wrap(dist, name, answers.guarded(name))
        if config.finalize_model_grads_func is not None:
            patches.wrap(config, "finalize_model_grads_func", answers.finalize)
        yield


class _Answers:
    def __init__(self, optimizer: Any, numbers: JobNumbers, ranks: frozenset[int]) -> None:
        self._numbers, self._ranks = numbers, ranks
        self._inner = inner_optimizers(optimizer)
        self._num_tokens: torch.Tensor | None = None

    def finalize(
        self, original: Function, model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Note the tensor that gets the number of tokens of the batch."""
        self._num_tokens = num_tokens
        try:
            return original(model, num_tokens, *args, **kwargs)
        finally:
            self._num_tokens = None

    def guarded(self, name: str) -> Function:
        """Return what stands around a collective."""

        def call(original: Function, *args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and self._answer(tensor):
                return None
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            self._check(name, given.get("group"))
            return original(*args, **kwargs)

        return call

    def _answer(self, tensor: torch.Tensor) -> bool:
        """Give a tensor its value of that time; return False if it has none."""
        if tensor is self._num_tokens:
            if self._numbers.num_tokens is None:
                raise UnrecoverableError(self._lacking("the number of tokens"))
            tensor.fill_(self._numbers.num_tokens)
            return True
        for number, inner in enumerate(self._inner):
            if tensor is getattr(inner, "found_inf", None):
                found = self._numbers.found_inf
                if len(found) != len(self._inner):
                    raise UnrecoverableError(self._lacking("which gradients are not finite"))
                tensor.fill_(float(found[number]))
                return True
        return False

    def _lacking(self, what: str) -> str:
        return f"the record of iteration {self._numbers.iteration} does not have {what}"

    def _check(self, name: str, group: Any) -> None:
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        if outside := sorted(set(members) - self._ranks):
            raise UnrecoverableError(
                f"torch.distributed.{name} of ranks {members} cannot be run again by ranks "
                f"{sorted(self._ranks)} alone: nothing answers for rank {outside[0]}. Start again with "
                "--moe-ft-recovery global, and report the model's flags"
            )
