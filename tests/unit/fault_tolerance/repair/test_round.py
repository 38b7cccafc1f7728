"""Traces of a broken iteration are removed; phases of a repair follow each other without a gap.

tests/distributed/test_repair.py has whole rounds.
"""

from argparse import Namespace
from typing import override

import pytest
import torch
from megatron.core.rerun_state_machine import (
    RerunState,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.timers import Timers
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import global_vars

from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.round import Phases, free
from moe_ft.loop.listeners import Listeners, LoopListener, LoopState
from moe_ft.loop.training_loop import LoopParts


class _Work:
    """A collective whose connections have ended."""

    has_ended = False

    def wait(self) -> None:
        self.has_ended = True
        raise RuntimeError("Connection closed by peer")


class _Suspended(LoopListener):
    iteration = 0

    @override
    def suspend(self, iteration: int) -> None:
        self.iteration = iteration


def test_everything_that_a_broken_iteration_has_begun_is_as_before_one(
    links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = Timers(2, "minmax")
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", timers)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("interval-time", "forward-backward"):
        timers(name, log_level=0).start()
    get_moe_metrics_tracker().record("loss", torch.ones(()), layer_number=1, num_layers=2)
    MTPLossLoggingHelper.tracker = {"values": torch.ones(1)}
    works = [_Work() for _ in range(3)]
    group = Namespace(
        grad_reduce_handle=Namespace(works=works[:2]),
        param_gather_handle=works[2],
        param_gather_dispatched=True,
        is_first_batch=False,
        golden_per_param_grad_ready_counts={"weight": 1},
        per_param_grad_ready_counts={"weight": 1},
    )
    inner = Namespace(_has_grad_norm_group_cache={"dp": True})
    optimizer = Namespace(_has_grad_norm_group_cache={}, chained_optimizers=[inner])
    model, listener = [Namespace(bucket_groups=[group])], _Suspended()
    parts = LoopParts(model=model, optimizer=optimizer, config=None, forward_backward=print)
    initialize_rerun_state_machine()
    try:
        machine = get_rerun_state_machine()
        machine.state, machine.current_iteration = RerunState.INITIAL_RUN, 9
        free(links, Listeners(LoopState(), [listener]), parts, 4)
        assert listener.iteration == 4
        assert (machine.state, machine.current_iteration) == (RerunState.NOT_RUNNING_YET, 4)
    finally:
        destroy_rerun_state_machine()
    timers("forward-backward").start()  # asserts that it is not running
    with pytest.raises(AssertionError, match="already been started"):
        timers("interval-time").start()  # the loop has started it, and goes on measuring
    assert not get_moe_metrics_tracker().metrics or not any(
        entry.values.any() for entry in get_moe_metrics_tracker().metrics.values()
    )
    assert MTPLossLoggingHelper.tracker == {}
    assert all(work.has_ended for work in works), "nothing writes into the buffers any more"
    assert vars(group) == {
        "grad_reduce_handle": None,
        "param_gather_handle": None,
        "param_gather_dispatched": False,
        "is_first_batch": True,
        "golden_per_param_grad_ready_counts": {},
        "per_param_grad_ready_counts": {},
    }
    assert optimizer._has_grad_norm_group_cache is None
    assert inner._has_grad_norm_group_cache is None


def test_phases_add_up_to_the_time_since_the_death() -> None:
    times = iter([12.5, 13.0])
    phases = Phases(10.25, lambda: next(times))
    phases.end("free")
    phases.begin_with(10.0)
    phases.end("swap")
    assert phases.seconds == {"notice": 0.25, "free": 2.25, "swap": 0.5}
    assert sum(phases.seconds.values()) == 13.0 - 10.0
    phases = Phases(10.0, lambda: 9.5)  # the clocks of two machines differ
    phases.begin_with(11.0)
    phases.end("free")
    assert phases.seconds == {"notice": 0.0, "free": 0.0}
