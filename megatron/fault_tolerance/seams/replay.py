"""Replay of logged iterations, with values that only their records hold.

It runs forward, backward and the optimizer step, and nothing else of train_step: counters, learning rates and
scales come from the records. After its window a stage has none of its own for further iterations, so their
schedulers step too. Turning the snapshots of a window into a state is moe_ft/recovery/restore.py.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.fault_tolerance.seams.answers import answering
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.pipeline_tap import playing
from moe_ft.format.records import Counted, IterationRecord, JobNumbers, RandomStates, numbers_of
from moe_ft.loop.training_loop import LoopParts, TrainingLoop
from moe_ft.recovery.borders import Borders
from moe_ft.recovery.restore import Conversion
from moe_ft.state.freezing import Freezing
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.random_states import apply_rng, current_rng
from moe_ft.state.tensors import inner_optimizers
from moe_ft.units import UnitId


def can_freeze(config: Any) -> bool:
    """Return whether a model's weight gradients are computed where autograd expects it.

    Otherwise frozen units also get gradients, and the replay drops them.
    """
    computes_them_later = any(
        getattr(config, name, False)
        for name in (
            "delay_wgrad_compute",
            "overlap_moe_expert_parallel_comm",
            "overlap_dispatch_backward_with_experts_wgrad",
            "defer_embedding_wgrad_compute",
        )
    )
    shards_weights = max(config.gtp_weight_remat_size, config.expert_gtp_weight_remat_size) > 1
    return not (computes_them_later or shards_weights)


class Replay:
    """One recovery's replay on one rank. Owned by the training thread; `run` is called by all ranks."""

    def __init__(
        self,
        conversion: Conversion,
        parameters: Collection[LocalParameter],
        training: TrainingLoop,
        note: Callable[[int], None],
        borders: Borders | None = None,
        meet_before: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        """Prepare a replay.

        Args:
            conversion: the window, whose first snapshot is restored.
            parameters: all of this rank.
            training: the loop whose iterations these are.
            note: called with the iteration before each optimizer step.
            borders: what answers for the other stages, if only some replay.
            meet_before: called with each iteration before it is run again; may call collectives of the job.
        """
        self._conversion, self._parameters = conversion, list(parameters)
        self._borders, self._meet_before = borders, meet_before
        self._training, self._note = training, note

    @property
    def first_record(self) -> IterationRecord:
        """Record of the state that the replay begins with."""
        return self._conversion.records[0]

    @property
    def last_record(self) -> Counted:
        """Counters of the state that the replay ends with."""
        return self._tail[-1] if self._tail else self._conversion.records[-1]

    @property
    def num_iterations(self) -> int:
        """Number of iterations to run again."""
        return self._conversion.num_replays + len(self._tail)

    @property
    def _tail(self) -> Sequence[JobNumbers]:
        return self._borders.tail if self._borders is not None else ()

    def run(self, loop: LoopParts) -> RandomStates:
        """Run the iterations again; return the random numbers of the state that this makes.

        The caller restores them, later. Iterations after the window have no record of this rank: they
        continue with the random numbers, buffers and scales that the one before has left.
        """
        tp_size = loop.config.tensor_model_parallel_size
        freezing = Freezing(self._parameters, tp_size=tp_size, is_possible=can_freeze(loop.config))
        with _quiet(loop), playing(self._borders.player) if self._borders else nullcontext():
            for position in range(self._conversion.num_replays):
                before, after = self._conversion.records[position : position + 2]
                apply_rng(before.rng)
                frozen = self._conversion.frozen_units(position)
                self._run_iteration(loop, before, after, freezing, frozen)
                self._conversion.load(position + 1)
            random_states = self._run_tail(loop, freezing)
        get_moe_metrics_tracker().clear()
        MTPLossLoggingHelper.tracker = {}
        return random_states

    def _run_tail(self, loop: LoopParts, freezing: Freezing) -> RandomStates:
        last = self._conversion.records[-1]
        if not self._tail:
            return last.rng
        apply_rng(last.rng)
        before: Counted = last
        for after in self._tail:
            if self._run_iteration(loop, before, after, freezing, frozenset()):
                self._conversion.step_scheduler(self._training.samples_ahead() or 0)
            before = after
        return current_rng()

    def _run_iteration(
        self,
        loop: LoopParts,
        before: Counted,
        after: Counted,
        freezing: Freezing,
        frozen: frozenset[UnitId],
    ) -> bool:
        """Run one iteration; return False if its step was skipped."""
        self._meet_before(before.iteration)
        player = None if self._borders is None else self._borders.player
        with self._answering(loop, after):
            for chunk in loop.model:
                chunk.zero_grad_buffer()
            loop.optimizer.zero_grad()
            if player is not None:
                player.begin(before.iteration)
            with freezing.frozen(frozen):
                self._training.run_forward_backward(loop, before, after)
            if player is not None:
                player.end()
            self._note(before.iteration)
            with _logged(loop.optimizer, after, freezing, frozen):
                has_stepped, *_ = loop.optimizer.step()
        return bool(has_stepped)

    def _answering(self, loop: LoopParts, after: Counted) -> AbstractContextManager[None]:
        if self._borders is None:
            return nullcontext()
        numbers = after if isinstance(after, JobNumbers) else numbers_of(after)
        return answering(loop.optimizer, loop.config, numbers, self._borders.ranks)


@contextmanager
def _logged(
    optimizer: ChainedOptimizer,
    record: Counted,
    freezing: Freezing,
    frozen: frozenset[UnitId],
) -> Iterator[None]:
    """Make the optimizer use the logged values: frozen units have no gradients to compute them from."""
    prepare, step = optimizer.prepare_grads, optimizer.step_with_ready_grads

    def prepare_grads() -> bool:
        prepare()  # its own answer, whether gradients are finite, lacks the frozen units
        return record.grad_norm is None

    def step_with_ready_grads() -> bool:
        freezing.drop_gradients(frozen)  # not earlier: clipping needs at least one gradient
        return bool(step())

    def compute_grad_norms_by_group() -> dict[str, float]:
        norms = {name: float(norm) for name, norm in record.grad_norms_by_group.items()}
        optimizer.grad_norms_by_group = norms
        return norms

    with Patches() as patches:
        patches.set(optimizer, "prepare_grads", prepare_grads)
        patches.set(optimizer, "step_with_ready_grads", step_with_ready_grads)
        patches.set(optimizer, "get_grad_norm", lambda: float(record.grad_norm or 0.0))
        patches.set(optimizer, "_compute_grad_norms_by_group", compute_grad_norms_by_group)
        yield


@contextmanager
def _quiet(loop: LoopParts) -> Iterator[None]:
    """Turn off timers, checks that need the loop, and overlap, which frozen units would break."""
    with _without_gathering_hooks(loop.model), Patches() as patches:
        configs = {id(each): each for each in _ddp_configs(loop)}.values()
        for config in configs:
            for name in (
                "overlap_grad_reduce",
                "overlap_param_gather",
                "check_for_nan_in_grad",
                "check_for_large_grads",
            ):
                patches.set(config, name, False)
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func", "timers"):
            patches.set(loop.config, name, None)
        optimizers = [loop.optimizer, *loop.optimizer.chained_optimizers]
        for config in {id(each.config): each.config for each in optimizers}.values():
            patches.set(config, "timers", None)
            patches.set(config, "log_num_zeros_in_grad", False)
        yield


@contextmanager
def _without_gathering_hooks(model: Iterable[Any]) -> Iterator[None]:
    """Take off the hooks that gather weights before a module runs; Megatron's own loop puts them on later."""
    hooked = [chunk for chunk in model if chunk.remove_forward_pre_hook_handles]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def _ddp_configs(loop: LoopParts) -> Iterator[Any]:
    for chunk in loop.model:
        yield chunk.ddp_config
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            yield group.ddp_config
    for inner in inner_optimizers(loop.optimizer):
        if hasattr(inner, "ddp_config"):
            yield inner.ddp_config
