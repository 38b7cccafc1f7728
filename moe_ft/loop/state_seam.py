"""Moment at which the engine acts on the state of an iteration.

That is the end of the iteration, except where the loop evaluates the state, saves it, or ends with it: then
the engine acts when the loop continues. An evaluation moves random numbers and the position in the validation
data. And a start that recovers a state continues with the next iteration: what was due with it must be done.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from moe_ft.loop.listeners import EndedIteration, LoopState
from moe_ft.loop.training_loop import TrainingLoop
from moe_ft.state.record import IterationFacts


class StateSeam:
    """Passes every state to the engine once, with its facts. Owned by the training thread."""

    def __init__(
        self,
        training: TrainingLoop,
        loop: LoopState,
        act: Callable[[IterationFacts, float], float],
        count_tokens: Callable[[], dict[str, torch.Tensor]],
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with the counters that the loop has.

        Args:
            act: takes the facts of the state as it is now and the seconds that its iteration took; returns
                the seconds for which training stood still.
            count_tokens: returns ``[expert]`` the tokens on this rank by MoE layer.
            wait: called when the loop uses a state before `act` gets it.
        """
        self._training, self._loop = training, loop
        self._act, self._count_tokens = act, count_tokens
        self._wait = wait
        self._num_operations = training.num_operations_so_far()
        self._postponed: EndedIteration | None = None  # the engine has not acted on its state yet
        self._last_facts: IterationFacts | None = None

    def end_iteration(self, ended: EndedIteration) -> None:
        """Pass the new state to the engine, unless the loop uses it first."""
        self._num_operations += self._training.num_operations_of(ended.num_samples)
        if self._training.is_used(ended.iteration):
            self._postponed = ended
            self._wait()
        else:
            self._pass(ended, ended.num_samples)

    def pass_postponed(self) -> None:
        """Pass the state that the loop has used first, if there is one."""
        ended, self._postponed = self._postponed, None
        if ended is not None:
            self._pass(ended, 0)

    def facts_ahead(self, num_samples: int) -> IterationFacts | None:
        """Return the facts of the iteration that runs as they will be at its end, but for the scheduler's.

        The optimizer has stepped. None if the loop uses the state first.
        """
        iteration = self._loop.iteration + 1
        if self._training.is_used(iteration):
            return None
        num_operations = self._num_operations + self._training.num_operations_of(num_samples)
        return replace(
            self._facts(num_samples),
            iteration=iteration,
            num_floating_point_operations=num_operations,
        )

    def facts_of(self, iteration: int) -> IterationFacts | None:
        """Return the facts of a state that was passed; None if it was not the last one."""
        facts = self._last_facts
        return facts if facts is not None and facts.iteration == iteration else None

    def last_facts(self) -> IterationFacts:
        """Return the facts of the last state that was passed, or the current ones if none was.

        They may differ: the loop may have skipped a batch in the meantime.
        """
        return self._last_facts or self._facts(0)

    def _pass(self, ended: EndedIteration, num_uncounted_samples: int) -> None:
        self._last_facts = self._facts(num_uncounted_samples)
        self._loop.stall_s += self._act(self._last_facts, ended.seconds)

    def _facts(self, num_uncounted_samples: int) -> IterationFacts:
        grad_norm = self._loop.grad_norm
        return IterationFacts(
            iteration=self._loop.iteration,
            grad_norm=None if grad_norm is None else float(grad_norm),
            num_tokens=self._loop.num_tokens,
            num_floating_point_operations=self._num_operations,
            tokens_per_expert=self._count_tokens(),
            counters=self._training.counters(num_uncounted_samples),
        )
