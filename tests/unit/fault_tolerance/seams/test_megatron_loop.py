"""Megatron's own loop answers with its arguments, and takes its counters from a recovery."""

from argparse import Namespace
from typing import Any

import msgspec
import pytest
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.errors import ConfigError
from moe_ft.loop.training_loop import LoopParts
from tests.unit.moe_ft.builders import make_record


def test_facts_are_those_of_the_arguments_at_the_time(loop_args: Namespace) -> None:
    loop = MegatronLoop()
    assert (loop.num_experts, loop.sequence_length, loop.train_iterations) == (4, 32, 10)
    loop_args.num_experts, loop_args.train_iters, loop_args.iteration = None, 20, 7
    assert (loop.num_experts, loop.train_iterations, loop.iteration) == (0, 20, 7)


def test_samples_of_an_iteration_that_megatron_has_not_counted_are_added(
    loop_args: Namespace,
) -> None:
    loop_args.consumed_train_samples, loop_args.consumed_valid_samples = 40, 4
    assert MegatronLoop().sample_counters(8) == {
        "consumed_train_samples": 48,
        "consumed_valid_samples": 4,
    }


def test_recovery_sets_the_counters_and_a_replay_the_data_position(loop_args: Namespace) -> None:
    loop = MegatronLoop()
    loop.resume(make_record(5))
    assert (loop_args.iteration, loop_args.consumed_train_samples) == (5, 40)
    loop.set_data_position(24)
    assert (loop_args.iteration, loop_args.consumed_train_samples) == (5, 24)


class Schedule:
    """Megatron's forward-backward: notes its arguments, and what the loop checks meanwhile."""

    def __init__(self, args: Namespace) -> None:
        args.decoder_seq_length, args.check_for_nan_in_loss_and_grad = None, True
        self.args = args
        self.calls: list[dict[str, Any]] = []
        self.checked: list[tuple[int, bool]] = []

    def run(self, **options: Any) -> None:
        """Note it."""
        self.calls.append(options)
        self.checked.append((self.args.curr_iteration, self.args.check_for_nan_in_loss_and_grad))

    @property
    def parts(self) -> LoopParts:
        """Return the parts that `train` would pass."""
        return LoopParts(
            model=["chunk"],
            optimizer=None,
            config=None,
            forward_backward=self.run,
            forward_step=print,
            data_iterator="data",
        )


def test_iteration_runs_again_as_train_step_runs_it(loop_args: Namespace) -> None:
    schedule = Schedule(loop_args)
    MegatronLoop().run_forward_backward(schedule.parts, make_record(3), make_record(4))
    assert schedule.calls == [
        {
            "forward_step_func": print,
            "data_iterator": "data",
            "model": ["chunk"],
            "num_microbatches": 2,
            "seq_length": 32,
            "micro_batch_size": 2,
            "decoder_seq_length": None,
            "forward_only": False,
        }
    ]
    assert schedule.checked == [(3, False)]
    assert loop_args.check_for_nan_in_loss_and_grad


def test_iteration_with_another_number_of_micro_batches_is_refused(loop_args: Namespace) -> None:
    schedule = Schedule(loop_args)
    assert get_num_microbatches() == 2
    after = msgspec.structs.replace(make_record(4), num_microbatches=4)
    with pytest.raises(ConfigError, match="iteration 3 had 4 micro-batches .* 2 with .*recover-f"):
        MegatronLoop().run_forward_backward(schedule.parts, make_record(3), after)
    assert schedule.calls == []
