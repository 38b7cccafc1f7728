"""Record of an iteration whose scheduler has not stepped yet, as it will be when it has.

Between the optimizer step and the scheduler's a rank may hang in a collective. Everything else that
state/record.py captures is final by then.
"""

import copy
from types import SimpleNamespace
from typing import Any

from moe_ft.state.record import CapturedRecord


def step_ahead(captured: CapturedRecord, scheduler: Any, increment: int) -> None:
    """Step a copy of the scheduler on captured parameter groups, and put its results into the record.

    Args:
        captured: shares no memory with the training state.
        scheduler: Megatron's OptimizerParamScheduler; stays as it is.
    """
    ahead = copy.copy(scheduler)
    groups = [group for each in captured.values["optimizers"] for group in each["groups"]]
    ahead.optimizer = SimpleNamespace(param_groups=groups)
    ahead.step(increment)
    captured.values["scheduler"] = dict(ahead.state_dict())
