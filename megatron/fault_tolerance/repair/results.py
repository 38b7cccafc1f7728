"""Result of a broken iteration that is not run again: ranks were past their optimizer step.

What is recovered is then the state that it made, and the loop still waits for its result. Megatron's own
`train_step` returns it, from what forward and backward have returned and from the norm in the record.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.training import get_args

from megatron.fault_tolerance.repair import leftovers
from megatron.fault_tolerance.repair.position import Position
from moe_ft.errors import RepairError
from moe_ft.loop.listeners import LoopState

Function = Callable[..., Any]

# With these flags an iteration gives, or writes, more than is kept of it.
_NEEDING_MORE = (
    "dsa_indexer_loss_coeff",
    "log_max_attention_logit",
    "log_num_zeros_in_grad",
    "moe_ft_router_log",
    "mtp_num_layers",
    "optimizer_cuda_graph",
    "qk_clip",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "save_activations_interval",
    "save_dgrads_interval",
    "save_params_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "vision_pretraining",
)


def can_be_kept(args: Any) -> bool:
    """Return whether the result of an iteration can be made without running it again."""
    return not any(getattr(args, name, None) for name in _NEEDING_MORE)


def most_iteration(positions: Sequence[Position], args: Any) -> int:
    """Return the latest iteration that can be recovered: the broken one, or the one after it.

    The state after the broken iteration will do if all survivors were in that iteration, and each can still
    make its result.

    Args:
        positions: of the survivors.
        args: Megatron's.
    """
    iterations = {each.iteration for each in positions}
    is_evaluated = any(each.is_evaluated for each in positions)  # its result was returned before
    return min(iterations) + (len(iterations) == 1 and can_be_kept(args) and not is_evaluated)


class KeptResult:
    """Forward and backward as they ended last on this rank, in training or in a replay.

    Owned by the training thread.
    """

    def __init__(self, loop: LoopState) -> None:
        """Keep nothing yet.

        Args:
            loop: says whether an iteration is being replayed.
        """
        self._loop = loop
        self._iteration: int | None = None
        self._losses: Any = None
        self._metrics: Mapping[str, torch.Tensor] = {}

    def around(self, forward_backward: Function) -> Function:
        """Return forward and backward that keep what they return."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._loop.is_replaying:  # a log line is about one iteration
                leftovers.clear_metrics()
            self._iteration = None
            self._losses = forward_backward(*args, **kwargs)
            entries = get_moe_metrics_tracker().metrics.items()
            self._metrics = {name: entry.values.clone() for name, entry in entries}
            self._iteration = get_args().curr_iteration
            return self._losses

        return run

    def answers(self, args: tuple[Any, ...], iteration: int, grad_norm: float | None) -> Any:
        """Return arguments with which `train_step` computes nothing and returns the result of an iteration.

        Its metrics are then those that the next log line reads.

        Args:
            args: of `train_step`.
            grad_norm: of the iteration; None if gradients were not finite.

        Raises:
            RepairError: if this rank has not kept the iteration.
        """
        if self._iteration != iteration:
            raise RepairError(
                f"the state after iteration {iteration} was recovered, and its result is not known"
            )
        for name, entry in get_moe_metrics_tracker().metrics.items():
            if name in self._metrics:
                entry.values.copy_(self._metrics[name])
        forward_step, data_iterator, model, _, _, config, _ = args
        stepped = _Stepped(grad_norm)
        return forward_step, data_iterator, model, stepped, stepped, config, self._return_losses

    def _return_losses(self, *args: Any, **kwargs: Any) -> Any:
        return self._losses


class _Stepped:
    """Optimizer and scheduler that have stepped."""

    def __init__(self, grad_norm: float | None) -> None:
        self._grad_norm = grad_norm

    def zero_grad(self) -> None:
        """Do nothing."""

    def step(self, increment: int = 0) -> tuple[bool, float | None, None]:
        """Return whether the step was made, the norm of the gradients, and no number of zeros."""
        return self._grad_norm is not None, self._grad_norm, None
