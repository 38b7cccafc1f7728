"""End of a broken iteration: its traces in Megatron's globals, and in model and optimizer, go."""

import gc
from contextlib import suppress
from typing import Any

from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_timers

from megatron.fault_tolerance.repair.links import Links
from moe_ft.loop.listeners import Listeners
from moe_ft.loop.training_loop import LoopParts

_LOOP_TIMER = "interval-time"


def free(links: Links, listeners: Listeners, parts: LoopParts, iteration: int) -> None:
    """Leave the broken iteration, which has ended with an exception. Not collective.

    Model, optimizer and Megatron's globals are then as before an iteration.
    """
    links.leave()
    listeners.suspend(iteration)
    machine = get_rerun_state_machine()
    machine.state, machine.current_iteration = RerunState.NOT_RUNNING_YET, iteration
    for name, timer in get_timers()._timers.items():
        if name != _LOOP_TIMER and getattr(timer, "_started", False):
            timer._started = False
    clear_metrics()
    for chunk in parts.model:
        for name in ("bucket_groups", "expert_parallel_bucket_groups"):
            for group in getattr(chunk, name, ()):
                _begin_again(group)
    for each in (parts.optimizer, *getattr(parts.optimizer, "chained_optimizers", ())):
        # All ask again what costs a collective and is asked once: a replacement has to ask.
        each._has_grad_norm_group_cache = None
    gc.collect()  # the frames of the exception hold activations, and contexts that must end now


def clear_metrics() -> None:
    """Forget numbers that the iterations so far have added up for the next log line."""
    get_moe_metrics_tracker().clear()
    MTPLossLoggingHelper.tracker = {}


def _begin_again(group: Any) -> None:
    """Make a group of buckets as in a new process, which orders reductions otherwise at first."""
    for handle in (group.grad_reduce_handle, group.param_gather_handle):
        for work in getattr(handle, "works", (handle,)):
            if work is not None:
                with suppress(RuntimeError):  # its connections have ended
                    work.wait()  # until nothing writes into the buffers any more
    group.grad_reduce_handle = group.param_gather_handle = None
    group.param_gather_dispatched = False
    group.is_first_batch = True
    group.golden_per_param_grad_ready_counts, group.per_param_grad_ready_counts = {}, {}
