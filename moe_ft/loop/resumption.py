"""Last steps of a recovery, which need the running loop: replay, data position, random numbers.

loop/checkpoints.py has restored weights and moments before.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.fault_tolerance.seams.replay import Replay
from moe_ft.format.records import Counted, IterationRecord, RandomStates
from moe_ft.loop.training_loop import LoopParts, TrainingLoop
from moe_ft.state.random_states import apply_rng


class Resumption:
    """Steps from a recovered state to the first iteration of the loop. Owned by the training thread."""

    def __init__(
        self, training: TrainingLoop, record: IterationRecord, replay: Replay | None
    ) -> None:
        """Set the counters of the loop, from which the data iterators are built next.

        Args:
            training: the loop.
            record: of the state that was restored, the last one of a window.
            replay: of the iterations that lead to the state that the loop continues from; None if it is in
                place.
        """
        self._training, self._replay = training, replay
        self._reached: Counted = record if replay is None else replay.last_record
        self._rng: RandomStates | None = record.rng  # until they are restored
        self._parts: LoopParts | None = None
        training.resume(self._reached)
        if replay is not None:
            # The data iterators begin with the batch that the replay reads first.
            training.set_data_position(replay.first_record.consumed_train_samples)

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradients that have led to the state of the loop; None if they were not finite."""
        norm = self._reached.grad_norm
        return None if norm is None else float(norm)

    @property
    def is_replay_due(self) -> bool:
        """True if iterations have to be run again."""
        return self._replay is not None

    def begin_training(self, parts: LoopParts) -> None:
        """Set the data position of the loop: the data iterators exist."""
        self._parts = parts
        if self._rng is not None:
            self._training.set_data_position(self._reached.consumed_train_samples)

    def replay(self, forward_backward: Callable[..., Any] | None) -> int:
        """Run the iterations again; return their number. Called by all ranks.

        Args:
            forward_backward: the loop's own, if it is about to call it.
        """
        replay, parts = self._replay, self._parts
        assert replay is not None and parts is not None
        if forward_backward is not None:
            parts = replace(parts, forward_backward=forward_backward)
        self._rng = replay.run(parts)
        self._replay = None
        self._training.resume(replay.last_record)
        return replay.num_iterations

    def restore_rng(self) -> None:
        """Restore the random numbers, once: nothing may draw any between this and the next forward pass."""
        if self._rng is not None:
            apply_rng(self._rng)
            self._rng = None
