"""A call of `train_step`, to be made again for any iteration."""

from collections.abc import Callable
from typing import Any

from megatron.fault_tolerance.repair.results import KeptResult
from moe_ft.loop.training_loop import LoopParts


class Step:
    """The call that Megatron's loop has made.

    Attributes:
        parts: of the loop.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kept: KeptResult,
    ) -> None:
        """Prepare.

        Args:
            original: `train_step`.
            args, kwargs: that the loop has called it with.
            kept: keeps what forward and backward return.
        """
        *others, forward_backward = args
        forward_backward = kept.around(forward_backward)
        self._original, self._args, self._kwargs = original, (*others, forward_backward), kwargs
        self._kept = kept
        forward_step, data_iterator, model, optimizer, _, config = others
        self.parts = LoopParts(
            forward_step=forward_step,
            data_iterator=data_iterator,
            model=model,
            optimizer=optimizer,
            config=config,
            forward_backward=forward_backward,
        )

    def run(self, iteration: int) -> Any:
        """Run an iteration."""
        return self._original(*self._args, **{**self._kwargs, "iteration": iteration})

    def answer(self, iteration: int, grad_norm: float | None) -> Any:
        """Return the result of an iteration whose state is there."""
        args = self._kept.answers(self._args, iteration, grad_norm)
        return self._original(*args, **{**self._kwargs, "iteration": iteration})
