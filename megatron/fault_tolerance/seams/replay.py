"""Replay of logged iterations, with values that only their records hold.

It runs forward, backward and the optimizer step, and nothing else of train_step: counters, learning rates and
scales come from the records. Turning the snapshots of a window into a state is moe_ft/recovery/replay.py.
"""

import argparse
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import ConfigError
from moe_ft.format.records import IterationRecord
from moe_ft.recovery.replay import Conversion
from moe_ft.state.freezing import Freezing
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.record import apply_rng
from moe_ft.state.tensors import inner_optimizers
from moe_ft.units import UnitId


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopParts:
    """Arguments with which the training loop runs an iteration."""

    forward_step: Callable[..., Any]
    data_iterator: Any
    model: Any
    optimizer: Any
    config: Any
    forward_backward: Callable[..., Any]


def can_freeze(args: argparse.Namespace) -> bool:
    """Return whether weight gradients are computed where autograd expects it.

    Otherwise frozen units also get gradients, and the replay drops them.
    """
    computes_them_later = any(
        getattr(args, name, False)
        for name in (
            "delay_wgrad_compute",
            "overlap_moe_expert_parallel_comm",
            "overlap_dispatch_backward_with_experts_wgrad",
            "defer_embedding_wgrad_compute",
        )
    )
    shards_weights = max(args.gtp_weight_remat_size, args.expert_gtp_weight_remat_size) > 1
    return not (computes_them_later or shards_weights)


class Replay:
    """One recovery's replay on one rank. Owned by the training thread; `run` is called by all ranks."""

    def __init__(
        self,
        conversion: Conversion,
        parameters: Collection[LocalParameter],
        args: argparse.Namespace,
        note: Callable[[int], None],
    ) -> None:
        """Prepare a replay.

        Args:
            conversion: the window, whose first snapshot is restored.
            parameters: all of this rank.
            note: called with the iteration before each optimizer step.
        """
        self._conversion, self._args, self._note = conversion, args, note
        self._freezing = Freezing(
            list(parameters),
            tp_size=args.tensor_model_parallel_size,
            is_possible=can_freeze(args),
        )

    @property
    def first_record(self) -> IterationRecord:
        """Record of the state that the replay begins with."""
        return self._conversion.records[0]

    @property
    def last_record(self) -> IterationRecord:
        """Record of the state that the replay ends with."""
        return self._conversion.records[-1]

    @property
    def num_iterations(self) -> int:
        """Number of iterations to run again."""
        return self._conversion.num_replays

    def run(self, loop: LoopParts) -> None:
        """Run the iterations of the window again, which makes the state of its last one.

        The caller restores the random numbers of that state.
        """
        with _quiet(loop, self._args):
            for position in range(self.num_iterations):
                before, after = self._conversion.records[position : position + 2]
                self._run_iteration(loop, before, after, self._conversion.frozen_units(position))
                self._conversion.load(position + 1)
        get_moe_metrics_tracker().clear()
        MTPLossLoggingHelper.tracker = {}

    def _run_iteration(
        self,
        loop: LoopParts,
        before: IterationRecord,
        after: IterationRecord,
        frozen: frozenset[UnitId],
    ) -> None:
        args = self._args
        update_num_microbatches(before.consumed_train_samples, consistency_check=False)
        if get_num_microbatches() != after.num_microbatches:
            raise ConfigError(
                f"iteration {before.iteration} had {after.num_microbatches} micro-batches and would have "
                f"{get_num_microbatches()} with the batch sizes of this start: a window can be recovered "
                "only with the settings of its run. Start with these settings, or ignore the window with "
                "--moe-ft-recover-from load."
            )
        args.curr_iteration = before.iteration
        apply_rng(before)
        for chunk in loop.model:
            chunk.zero_grad_buffer()
        loop.optimizer.zero_grad()
        with self._freezing.frozen(frozen):
            loop.forward_backward(
                forward_step_func=loop.forward_step,
                data_iterator=loop.data_iterator,
                model=loop.model,
                num_microbatches=after.num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                forward_only=False,
            )
        self._note(before.iteration)
        with self._logged(loop.optimizer, after, frozen):
            loop.optimizer.step()

    @contextmanager
    def _logged(
        self, optimizer: ChainedOptimizer, record: IterationRecord, frozen: frozenset[UnitId]
    ) -> Iterator[None]:
        """Make the optimizer use the logged values: frozen units have no gradients to compute them from."""
        prepare, step = optimizer.prepare_grads, optimizer.step_with_ready_grads

        def prepare_grads() -> bool:
            prepare()  # its own answer, whether gradients are finite, lacks the frozen units
            return record.grad_norm is None

        def step_with_ready_grads() -> bool:
            self._freezing.drop_gradients(
                frozen
            )  # not earlier: clipping needs at least one gradient
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
def _quiet(loop: LoopParts, args: argparse.Namespace) -> Iterator[None]:
    """Turn off timers, checks that need the loop, and overlap, which frozen units would break."""
    with Patches() as patches:
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
        patches.set(args, "check_for_nan_in_loss_and_grad", False)
        yield


def _ddp_configs(loop: LoopParts) -> Iterator[Any]:
    for chunk in loop.model:
        yield chunk.ddp_config
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            yield group.ddp_config
    for inner in inner_optimizers(loop.optimizer):
        if hasattr(inner, "ddp_config"):
            yield inner.ddp_config
