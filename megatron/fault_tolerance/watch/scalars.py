"""Numbers for the TensorBoard and W&B writers of Megatron, under moe-ft/."""

from collections.abc import Mapping

from megatron.training import get_tensorboard_writer, get_wandb_writer

from megatron.fault_tolerance.seams.listeners import EndedIteration, LoopListener, LoopState


class Scalars(LoopListener):
    """Writes numbers on the rank that has the writers. Owned by the training thread."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop

    def after_iteration(self, ended: EndedIteration) -> None:
        """Write the times of the iteration."""
        self.write(
            {"iteration_s": ended.seconds, "stall_s": self._loop.stall_s}, iteration=ended.iteration
        )

    def write(self, values: Mapping[str, float], *, iteration: int) -> None:
        """Write numbers by name."""
        scalars = {f"moe-ft/{name}": value for name, value in values.items()}
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        if board:
            for name, value in scalars.items():
                board.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)
