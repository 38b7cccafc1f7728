"""Moment at which the engine acts on the state of an iteration.

That is the end of the iteration, except where the loop evaluates the state: evaluation moves random numbers
and the position in the validation data, so the engine then acts when the loop continues.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.training import get_args
from megatron.training.training import num_floating_point_operations

from megatron.fault_tolerance.seams.listeners import EndedIteration, LoopState
from megatron.fault_tolerance.seams.loop_facts import is_evaluated, iteration_facts
from moe_ft.state.record import IterationFacts


class StateSeam:
    """Passes every state to the engine once, with its facts. Owned by the training thread."""

    def __init__(
        self,
        loop: LoopState,
        act: Callable[[IterationFacts, float], float],
        count_tokens: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        """Prepare for an iteration; the loop's counters are set.

        Args:
            loop: its grad_norm and num_tokens become facts.
            act: takes the facts of the state as it is now and the seconds that its iteration took; returns
                the seconds for which training stood still.
            count_tokens: returns ``[expert]`` the tokens on this rank by MoE layer.
        """
        self._loop, self._act, self._count_tokens = loop, act, count_tokens
        self._num_operations = float(get_args().num_floating_point_operations_so_far)
        self._postponed: EndedIteration | None = None  # the engine has not acted on its state yet
        self._last_facts: IterationFacts | None = None

    def end_iteration(self, ended: EndedIteration) -> None:
        """Pass the new state to the engine, unless it is evaluated first."""
        args: Any = get_args()
        self._num_operations += num_floating_point_operations(args, ended.num_samples)
        if is_evaluated(args, ended.iteration):
            self._postponed = ended
        else:
            self._pass(ended, ended.num_samples)

    def pass_postponed(self) -> None:
        """Pass the state that was evaluated first, if there is one."""
        ended, self._postponed = self._postponed, None
        if ended is not None:
            self._pass(ended, 0)

    def last_facts(self) -> IterationFacts:
        """Return the facts of the last state that was passed, or the current ones if none was.

        They may differ: the loop may have skipped a batch in the meantime.
        """
        return self._last_facts or self._facts(0)

    def _pass(self, ended: EndedIteration, num_uncounted_samples: int) -> None:
        self._last_facts = self._facts(num_uncounted_samples)
        self._loop.stall_s += self._act(self._last_facts, ended.seconds)

    def _facts(self, num_uncounted_samples: int) -> IterationFacts:
        return iteration_facts(
            get_args(),
            self._loop.iteration,
            grad_norm=self._loop.grad_norm,
            num_tokens=self._loop.num_tokens,
            num_samples=num_uncounted_samples,
            num_floating_point_operations=self._num_operations,
            tokens_per_expert=self._count_tokens(),
        )
