"""A record whose scheduler has stepped ahead is the record after the scheduler's step."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from moe_ft.state.record import CapturedRecord, step_ahead

FACTS: Any = None


def make_scheduler() -> Any:
    """Return a scheduler that warms up, decays, and changes the weight decay, and its optimizer."""
    groups: list[dict[str, Any]] = [
        {"params": [torch.zeros(1)], "lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "wd_mult": 1.0},
        {"params": [torch.zeros(1)], "lr": torch.zeros(1), "max_lr": 2.0, "min_lr": 0.5},
    ]
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=16,
        lr_decay_steps=64,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=64,
        wd_incr_style="linear",
    )


def captured(scheduler: Any) -> CapturedRecord:
    """Return copies of the values that a scheduler changes."""
    groups = [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in scheduler.optimizer.param_groups
    ]
    optimizers = [{"groups": groups[:1]}, {"groups": groups[1:]}]
    values = {"scheduler": dict(scheduler.state_dict()), "optimizers": optimizers}
    return CapturedRecord(facts=FACTS, values=values)


def test_record_ahead_is_the_one_after_the_step() -> None:
    scheduler = make_scheduler()
    for _ in range(6):  # through the end of the warm-up
        record = captured(scheduler)
        step_ahead(record, scheduler, 8)
        scheduler.step(8)
        assert record.values == captured(scheduler).values


def test_live_scheduler_and_groups_stay_as_they_are() -> None:
    scheduler = make_scheduler()
    scheduler.step(8)
    before = captured(scheduler)
    step_ahead(captured(scheduler), scheduler, 8)
    assert captured(scheduler).values == before.values
    assert scheduler.num_steps == 8
