"""Megatron's own loop answers with its arguments, and takes its counters from a recovery."""

from argparse import Namespace
from typing import Any

import msgspec
import pytest
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron.fault_tolerance.seams.megatron_loop import (
    MegatronLoop,
    is_evaluated,
    pipeline_traffic,
    timeout_of_groups_s,
)
from megatron.fault_tolerance.seams.uneven_batches import samples_of_iteration
from moe_ft.errors import ConfigError
from moe_ft.loop.training_loop import LoopParts
from tests.unit.moe_ft.builders import make_record


class _Schedule:
    """Megatron's forward-backward: notes its arguments, and what the loop checks meanwhile."""

    def __init__(self, args: Namespace) -> None:
        args.decoder_seq_length, args.check_for_nan_in_loss_and_grad = None, True
        self.args = args
        self.calls: list[dict[str, Any]] = []
        self.checked: list[tuple[int, bool]] = []

    def run(self, **options: Any) -> None:
        self.calls.append(options)
        self.checked.append((self.args.curr_iteration, self.args.check_for_nan_in_loss_and_grad))

    @property
    def parts(self) -> LoopParts:
        return LoopParts(
            model=["chunk"],
            optimizer=None,
            config=None,
            forward_backward=self.run,
            forward_step=print,
            data_iterator="data",
        )


def test_iteration_runs_again_as_train_step_runs_it(loop_args: Namespace) -> None:
    schedule = _Schedule(loop_args)
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
    schedule = _Schedule(loop_args)
    assert get_num_microbatches() == 2
    after = msgspec.structs.replace(make_record(4), num_microbatches=4)
    with pytest.raises(ConfigError, match="iteration 3 had 4 micro-batches .* 2 with .*recover-f"):
        MegatronLoop().run_forward_backward(schedule.parts, make_record(3), after)
    assert schedule.calls == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ""),
        ({"load": "/a"}, ""),  # continues a run
        ({"finetune": True, "load": "/a"}, "--finetune --load /a"),
        ({"ckpt_step": 7, "load": "/a"}, "--ckpt-step 7 --load /a"),
        ({"finetune": True}, "--finetune"),
        ({"pretrained_checkpoint": "/b"}, "--pretrained-checkpoint /b"),
    ],
)
def test_run_that_begins_with_the_weights_of_another_says_which(
    flags: dict[str, object], expected: str, loop_args: Namespace
) -> None:
    vars(loop_args).update(flags)
    assert MegatronLoop().began_with() == expected


@pytest.mark.parametrize(
    ("flags", "iterations"),
    [
        ({"do_valid": False}, []),
        ({"eval_interval": 0}, []),
        ({}, [2, 4, 6]),
        ({"start_eval_at_iter": 4}, [4, 6]),
    ],
)
def test_evaluated_iterations_are_those_that_the_loop_evaluates(
    flags: dict[str, object], iterations: list[int], loop_args: Namespace
) -> None:
    vars(loop_args).update({"do_valid": True, **flags})
    assert [i for i in range(1, 7) if is_evaluated(loop_args, i)] == iterations


@pytest.mark.parametrize(
    ("flags", "iterations"),
    [
        ({}, []),
        ({"save_interval": 2}, []),  # without --save there are none
        ({"save": "folder", "save_interval": 2}, [2, 4, 6]),
        ({"save": "folder", "save_interval": 4, "non_persistent_save_interval": 3}, [3, 4, 6]),
        ({"exit_interval": 4}, [4]),
        ({"phase_transition_iterations": [2, 5]}, [2, 5]),
    ],
)
def test_saved_and_last_iterations_are_those_of_the_intervals(
    flags: dict[str, object], iterations: list[int], loop_args: Namespace
) -> None:
    vars(loop_args).update(flags)
    assert [i for i in range(1, 7) if MegatronLoop().is_used(i)] == iterations


def test_collectives_time_out_as_the_flags_say() -> None:
    args = Namespace(distributed_timeout_minutes=10, distributed_timeout_seconds_after_init=None)
    assert timeout_of_groups_s(args) == 600
    args.distributed_timeout_seconds_after_init = 45
    assert timeout_of_groups_s(args) == 45


def test_samples_of_an_iteration_are_those_of_all_readers(loop_args: Namespace) -> None:
    assert samples_of_iteration(loop_args) == 8
    loop_args.gtp_weight_remat_size = 2
    assert samples_of_iteration(loop_args) == 16


def test_loop_continues_with_the_counters_and_the_batch_size_of_a_record(
    loop_args: Namespace,
) -> None:
    record = msgspec.structs.replace(
        make_record(5), consumed_valid_samples=4, skipped_train_samples=3
    )
    MegatronLoop().resume(record)
    assert loop_args.iteration == 5
    assert loop_args.consumed_train_samples == 40
    assert loop_args.consumed_valid_samples == 4
    assert loop_args.skipped_train_samples == 3
    assert loop_args.num_floating_point_operations_so_far == 1e15
    assert get_num_microbatches() == 2


@pytest.mark.parametrize(
    ("changes", "sends", "shape", "element_bytes"),
    [
        ({}, (2, 2), (32, 2, 64), 2),
        ({"virtual_pipeline_model_parallel_size": 2}, (6, 6), (32, 2, 64), 2),
        ({"context_parallel_size": 4}, (2, 2), (8, 2, 64), 2),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 2}, (2, 2), (16, 2, 64), 2),
        ({"tensor_model_parallel_size": 2}, (2, 2), (32, 2, 64), 2),  # each rank sends all of it
        ({"global_batch_size": 24, "data_parallel_size": 3}, (4, 4), (32, 2, 64), 2),
        ({"step_batch_size_schedule": "0:8 1K:32"}, (8, 8), (32, 2, 64), 2),
        ({"fp32_residual_connection": True}, (2, 2), (32, 2, 64), 4),
    ],
)
def test_traffic_of_the_pipeline_follows_from_the_flags(
    changes: dict[str, object],
    sends: tuple[int, int],
    shape: tuple[int, int, int],
    element_bytes: int,
    loop_args: Namespace,
) -> None:
    vars(loop_args).update(
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "decoder_seq_length": None,
            "sequence_parallel": False,
            "hidden_size": 64,
            "step_batch_size_schedule": None,
            "fp32_residual_connection": False,
            "params_dtype": torch.bfloat16,
            **changes,
        }
    )
    traffic = pipeline_traffic(loop_args)
    assert (traffic.num_sends(0), traffic.num_sends(1)) == sends
    assert (traffic.shape, traffic.element_bytes) == (shape, element_bytes)
