"""Megatron's rerun state machine, which checks losses and gradients and repeats an iteration that fails.

It is no part of a state: what it knows of an iteration that was repeated on a GPU ends with the process.
"""

import dataclasses
from typing import Any

from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.training import get_args

from moe_ft.loop.listeners import RejectedResult


def begin_reruns_again(iteration: int) -> None:
    """Continue after an iteration whose state was recovered.

    A checkpoint of --load may have left the machine in the middle of another iteration, with its batch. And
    it checks nothing before a first step, since it could not save then; what was recovered can be saved.
    """
    machine = get_rerun_state_machine()
    machine.state, machine.current_iteration = RerunState.NOT_RUNNING_YET, iteration
    machine.data_iterator_checkpoints = machine.failed_validation_call = None
    machine.first_iteration_complete = True


def rejected_result(exit_code: int) -> RejectedResult | None:
    """Return what was rejected in the iteration that has just run; None if nothing was.

    Args:
        exit_code: with which Megatron ends; 0 if it continues, as after spikes.
    """
    machine = get_rerun_state_machine()
    is_own = machine.mode is RerunMode.VALIDATE_RESULTS and machine.rerun_requested
    if not (exit_code or is_own):
        return None
    rejected = RejectedResult(exit_code=exit_code)
    call = machine.failed_validation_call
    if not is_own or call is None:
        return rejected
    return dataclasses.replace(
        rejected, result=f"{machine.initial_result}", check=call.caller.message
    )


def without_save_to_nothing(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what `train_step` has returned, asking for no checkpoint if --save names no directory.

    Megatron would end with a TypeError, and its exit code would be lost.
    """
    losses, is_skipped, should_save, *rest = result
    return losses, is_skipped, should_save and get_args().save is not None, *rest
