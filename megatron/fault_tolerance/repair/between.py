"""Log lines and evaluations in Megatron's loop: after a death in one, survivors begin it again.

The iteration before it then counts as the broken one. Survivors repair within `training_log` or `evaluate`,
so their loop never knows. A replacement joins them in the `train_step` of that iteration, and its own loop
brings it to the log line. If all survivors had logged, nobody logs again.

Evaluations between the state that a repair recovers and the broken iteration are skipped.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, override

import torch.distributed as dist
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_timers

from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.watcher import Watcher
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.megatron_loop import COUNTERS, is_evaluated
from megatron.fault_tolerance.seams.replay import clear_metrics
from megatron.fault_tolerance.seams.stack import Function, Layer, Layers, loop_functions
from moe_ft.cluster.member import Done, LoopPosition, Member
from moe_ft.errors import RepairError
from moe_ft.state.random_states import current_rng

_COUNTERS = ("iteration", "curr_iteration", *COUNTERS)


class BetweenIterations:
    """Log lines and evaluations of one rank, each begun again until no rank dies in it.

    Owned by the training thread.
    """

    def __init__(
        self,
        watcher: Watcher,
        member: Member,
        links: Links,
        data_sets: DataSets,
        wait_for_all: Callable[[], None],
        notice: Callable[[BaseException], float],
        repair: Callable[[float], None],
    ) -> None:
        """Repeat nothing yet.

        Args:
            notice: returns when a death was noticed; raises the exception if no rank has died.
            repair: repairs from that time on, and runs the iteration again that is logged or evaluated.
        """
        self._watcher = watcher
        self._member = member
        self._links = links
        self._wait_for_all = wait_for_all
        self._notice = notice
        self._repair = repair
        self._data_sets = data_sets
        self._is_training = self._leaves_out_log = False

    def install(self, layers: Layers) -> None:
        """Watch the loop log and evaluate."""
        functions = {"train": self._train, "evaluate": self._evaluate, "training_log": self._log}
        layers.put(Layer.BETWEEN, functions)

    def follow(self, survivors: LoopPosition) -> None:
        """Leave a log line out that the survivors have written."""
        self._leaves_out_log = survivors.done >= Done.LOG

    def _train(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._is_training = True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_training = False  # evaluations that follow are not repaired

    def _log(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Log an iteration. All ranks leave it together. Called by all ranks."""
        member, totals, result = self._member, args[1], None
        if self._leaves_out_log:
            self._leaves_out_log = False
            clear_metrics()
            return args[5]  # whether memory is still to be reported
        # A start logs its first iteration with collectives, which a replacement leaves out.
        kwargs["is_first_iteration"] &= not member.has_met
        if not can_log_again(member):
            result = original(*args, **kwargs)
            self._wait_for_all()
            return result
        before = after = _Loop()
        totals_before = deepcopy(totals)
        member.note(Done.STEP)
        while True:
            try:
                with self._watcher.inside():
                    result = original(*args, **kwargs)
                    self._links.check()  # or the sums may be wrong
                    after = _Loop()
                    member.note(Done.LOG)
                    self._wait_for_all()
                return result
            except BaseException as error:
                noticed_s = self._notice(error)
            self._repair(noticed_s)
            if member.all_had_logged:
                after.restore()
                clear_metrics()
                return result
            before.restore()
            kwargs["is_first_iteration"] = False
            totals.clear()
            totals.update(deepcopy(totals_before))
            member.note(Done.STEP)

    def _evaluate(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        _, iterators, model, _, config, *_ = args
        if not self._is_training or not can_evaluate_again():
            return original(*args, **kwargs)
        while True:
            before = _Evaluating(model, config)
            try:
                with self._watcher.inside():
                    result = original(*args, **kwargs)
                    self._wait_for_all()
                return result
            except BaseException as error:
                noticed_s = self._notice(error)
            before.restore()
            self._member.note(Done.EVALUATING)
            self._repair(noticed_s)
            before.restore()
            self._data_sets.renew_validation(iterators)
            dist.barrier()  # the loop of a replacement is there, and begins an evaluation with one


class _Loop:
    """Counters and timers of Megatron's loop."""

    def __init__(self) -> None:
        self._counters = {name: getattr(get_args(), name) for name in _COUNTERS}
        self._timers = [(each, dict(vars(each))) for each in get_timers()._timers.values()]

    def restore(self) -> None:
        """Set them."""
        for name, value in self._counters.items():
            setattr(get_args(), name, value)
        for each, values in self._timers:
            vars(each).update(values)


class _Evaluating(_Loop):
    """Settings of Megatron's loop when an evaluation begins."""

    def __init__(self, model: Sequence[Any], config: Any) -> None:
        super().__init__()
        self._model = model
        self._config = config
        self._mode = get_rerun_state_machine().get_mode()

    @override
    def restore(self) -> None:
        super().restore()
        for chunk in self._model:
            chunk.train()
        get_rerun_state_machine().set_mode(self._mode)
        self._config.timers = get_timers()
        clear_metrics()


def can_log_again(member: Member) -> bool:
    """Return whether a replacement comes to a log line without collectives that the others have made.

    With --overlap-param-gather the loop has modules gather weights after its first iteration.
    """
    args, position = get_args(), member.position
    is_like_others = position is not None and (
        position.gathers_weights or not loop_functions().should_disable_forward_pre_hook(args)
    )
    return is_like_others and not (
        args.log_params_norm or args.perform_rl_step or loop_functions()._seqlen_stats_active
    )


def can_evaluate_again() -> bool:
    """Return whether a replacement comes to an evaluation without collectives that the others have made."""
    args = get_args()
    return not (
        args.full_validation
        or args.log_params_norm
        or args.perform_rl_step
        or loop_functions()._seqlen_stats_active
        or loop_functions().should_disable_forward_pre_hook(args)
    )


class SkippedEvaluations:
    """Evaluations that are not made again while iterations run again. Owned by the training thread.

    Attributes:
        draw: whether evaluations draw random numbers, which training would then continue without.
    """

    def __init__(self) -> None:
        self.draw = False

    def install(self, layers: Layers) -> None:
        """Watch the loop evaluate."""
        layers.put(Layer.BETWEEN, {"evaluate_and_print_results": self._evaluate})

    def _evaluate(self, original: Function, *args: Any, **kwargs: Any) -> Any:
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
