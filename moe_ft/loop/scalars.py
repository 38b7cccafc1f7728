"""Numbers for the writers of the training loop, under moe-ft/: TensorBoard and W&B in Megatron's loop."""

from collections.abc import Mapping

from moe_ft.loop.listeners import EndedIteration, LoopListener, LoopState
from moe_ft.loop.training_loop import TrainingLoop


class Scalars(LoopListener):
    """Writes numbers where the loop writes its own. Owned by the training thread."""

    def __init__(self, training: TrainingLoop, loop: LoopState) -> None:
        self._training, self._loop = training, loop

    def after_iteration(self, ended: EndedIteration) -> None:
        """Write the times of the iteration."""
        self.write(
            {"iteration_s": ended.seconds, "stall_s": self._loop.stall_s}, iteration=ended.iteration
        )

    def write(self, values: Mapping[str, float], *, iteration: int) -> None:
        """Write numbers by name."""
        self._training.write_numbers(values, iteration=iteration)
