"""Fixtures of the training loop, as those of Megatron's seams have them."""

from tests.unit.fault_tolerance.conftest import event_log, loop_args

__all__ = ["event_log", "loop_args"]
