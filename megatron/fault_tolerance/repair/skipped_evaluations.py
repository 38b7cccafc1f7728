"""Evaluations between the state that a repair recovers and the broken iteration: they are skipped.

evaluating_again.py has the other ones: those in which a rank dies.
"""

from collections.abc import Callable
from typing import Any

from megatron.training import training

from megatron.fault_tolerance.seams.loop_facts import is_evaluated
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import RepairError
from moe_ft.state.random_states import current_rng


class SkippedEvaluations:
    """Evaluations that are not made again while iterations run again. Owned by the training thread.

    Attributes:
        draw: whether evaluations draw random numbers, which training would then continue without.
    """

    def __init__(self) -> None:
        self.draw = False

    def install(self, patches: Patches) -> None:
        """Watch the loop evaluate."""
        patches.wrap(training, "evaluate_and_print_results", self._evaluate)

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = current_rng()
        result = original(*args, **kwargs)
        self.draw = self.draw or current_rng() != before
        return result

    def skip(self, args: Any, iteration: int) -> None:
        """Count the samples of the evaluation of an iteration, if there was one, and make none.

        Raises:
            RepairError: if the random numbers after it are not known.
        """
        if not is_evaluated(args, iteration):
            return
        if self.draw:
            raise RepairError(
                f"iterations before the evaluation of iteration {iteration} would run again, and evaluations "
                "draw random numbers"
            )
        # A list with --full-validation of several sets, each of which is read from its beginning.
        if isinstance(args.eval_iters, int):
            args.consumed_valid_samples += args.eval_iters * args.eval_global_batch_size
