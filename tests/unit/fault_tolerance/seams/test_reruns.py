"""Rejected results, and Megatron's rerun state machine after a recovery. One rank, without a GPU."""

from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    RerunDataIterator,
    RerunMode,
    RerunStateMachine,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.fault_tolerance.seams import reruns
from megatron.fault_tolerance.seams.reruns import (
    begin_reruns_again,
    rejected_result,
    without_save_to_nothing,
)
from moe_ft.loop.listeners import RejectedResult

NAN = torch.tensor(float("nan"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[RerunStateMachine]:
    """Yield the machine of a job of one rank in Megatron's default mode."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("_save_state", "_restore_state"):  # of random numbers
        monkeypatch.setattr(RerunStateMachine, name, lambda machine: None)
    monkeypatch.setattr(RerunStateMachine, "_reduce_any", _reduce_alone)
    destroy_rerun_state_machine()  # whoever asks for it makes one
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield get_rerun_state_machine()
    destroy_rerun_state_machine()


def _reduce_alone(machine: RerunStateMachine, value: bool | list[bool]) -> bool | tuple[bool, ...]:
    return tuple(value) if isinstance(value, list) else value


def run_iteration(
    machine: RerunStateMachine,
    batches: RerunDataIterator,
    results: list[torch.Tensor],
    *,
    fatal: bool,
) -> tuple[list[int], int]:
    """Run an iteration whose attempts compute the given results; return its batches, and the exit code."""
    read, left = [], [*results]
    while machine.should_run_forward_backward(batches):
        read.append(next(batches))
        machine.validate_result(left.pop(0), torch.isnan, "NaN", fatal=fatal)
    return read, machine.should_checkpoint_and_exit()[2]


@pytest.mark.parametrize(
    ("results", "fatal", "code"),
    [
        ([NAN, NAN], True, EXIT_CODE_RESUME_TO_DISAMBIGUATE),
        ([NAN, torch.zeros(())], True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION),
        ([NAN, NAN], False, 0),
    ],
)
def test_result_that_is_rejected_is_named_whether_training_ends_or_not(
    results: list[torch.Tensor], fatal: bool, code: int, machine: RerunStateMachine
) -> None:
    begin_reruns_again(4)
    batches = RerunDataIterator(iter(range(9)))
    _, found = run_iteration(machine, batches, results, fatal=fatal)
    assert found == code
    assert rejected_result(code) == RejectedResult(exit_code=code, result="nan", check="NaN")
    if code == 0:
        run_iteration(machine, batches, [torch.zeros(())], fatal=True)
        assert rejected_result(0) is None


def test_result_of_another_rank_ends_training_without_a_name(machine: RerunStateMachine) -> None:
    begin_reruns_again(4)
    run_iteration(machine, RerunDataIterator(iter([0])), [torch.zeros(())], fatal=True)
    assert str(rejected_result(16)) == "the result of another rank was rejected"


def test_recovery_leaves_nothing_of_the_iteration_that_load_has_brought(
    machine: RerunStateMachine,
) -> None:
    begin_reruns_again(7)
    run_iteration(machine, RerunDataIterator(iter([7])), [NAN, NAN], fatal=True)
    machine.data_iterator_checkpoints = [
        {"saved_microbatches": [7], "replaying": True, "replay_pos": 0}
    ]
    begin_reruns_again(4)
    batches = RerunDataIterator(iter([4, 5]))
    assert run_iteration(machine, batches, [torch.zeros(())], fatal=True) == ([4], 0)
    assert machine.current_iteration == 5
    assert rejected_result(0) is None


@pytest.mark.parametrize("save", [None, "/checkpoints"])
def test_checkpoint_is_asked_for_only_with_a_place_to_save_to(
    save: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reruns, "get_args", lambda: Namespace(save=save))
    result = without_save_to_nothing(({}, True, True, True, 16, None, None, 0))
    assert result == ({}, True, save is not None, True, 16, None, None, 0)
