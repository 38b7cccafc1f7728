"""Megatron's own training loop, `megatron.training.pretrain`, as the listeners see it.

Its arguments are read when they are asked for: Megatron sets them after the listeners exist. Most of the work
is loop_facts.py.
"""

from collections.abc import Mapping
from typing import Any, override

from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
from megatron.training.training import num_floating_point_operations

from megatron.fault_tolerance.seams import loop_facts
from megatron.fault_tolerance.seams.core_loop import CoreLoop
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import ConfigError
from moe_ft.format.records import Counted
from moe_ft.loop.training_loop import LoopParts
from moe_ft.recovery.facts import JobFacts
from moe_ft.state.record import LoopCounters


class MegatronLoop(CoreLoop):
    """The loop whose arguments `megatron.training.get_args` returns."""

    @property
    @override
    def num_experts(self) -> int:
        return int(get_args().num_experts or 0)

    @property
    @override
    def train_iterations(self) -> int | None:
        iterations: int | None = get_args().train_iters
        return iterations

    @property
    @override
    def sequence_length(self) -> int:
        return int(get_args().seq_length)

    @property
    @override
    def iteration(self) -> int:
        return int(get_args().iteration)

    @override
    def began_with(self) -> str:
        return loop_facts.began_with(get_args())

    @override
    def job_facts(self, began_with: str) -> JobFacts:
        return loop_facts.job_facts(get_args(), began_with)

    @override
    def start_fields(self) -> dict[str, Any]:
        args = get_args()
        return {
            "world_size": args.world_size,
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "ep": args.expert_model_parallel_size,
            "etp": args.expert_tensor_parallel_size,
            "dp": args.data_parallel_size,
            "seq_length": args.seq_length,
            "num_experts": args.num_experts,
            "train_iterations": args.train_iters,
        }

    @override
    def sample_counters(self, num_uncounted: int) -> dict[str, int]:
        args = get_args()
        return {
            "consumed_train_samples": args.consumed_train_samples + num_uncounted,
            "consumed_valid_samples": args.consumed_valid_samples,
        }

    @override
    def is_used(self, iteration: int) -> bool:
        args = get_args()
        is_saved_or_last = loop_facts.is_saved_or_last(args, iteration)
        return is_saved_or_last or loop_facts.is_evaluated(args, iteration)

    @override
    def is_logged(self, iteration: int) -> bool:
        return bool(iteration % get_args().log_interval == 0)

    @override
    def samples_ahead(self) -> int:
        return loop_facts.samples_of_iteration(get_args())

    @override
    def num_operations_so_far(self) -> float:
        return float(get_args().num_floating_point_operations_so_far)

    @override
    def num_operations_of(self, num_samples: int) -> float:
        return float(num_floating_point_operations(get_args(), num_samples))

    @override
    def counters(self, num_uncounted: int) -> LoopCounters:
        return loop_facts.counters(get_args(), num_uncounted)

    @override
    def resume(self, record: Counted) -> None:
        loop_facts.resume(get_args(), record)

    @override
    def set_data_position(self, consumed_samples: int) -> None:
        get_args().consumed_train_samples = consumed_samples

    @override
    def run_forward_backward(self, parts: LoopParts, before: Counted, after: Counted) -> None:
        args = get_args()
        update_num_microbatches(before.consumed_train_samples, consistency_check=False)
        if get_num_microbatches() != after.num_microbatches:
            raise ConfigError(
                f"iteration {before.iteration} had {after.num_microbatches} micro-batches and would have "
                f"{get_num_microbatches()} with the batch sizes of this start: a window can be recovered "
                "only with the settings of its run. Start with these settings, or ignore the window with "
                "--moe-ft-recover-from load."
            )
        args.curr_iteration = before.iteration
        with Patches() as patches:
            patches.set(args, "check_for_nan_in_loss_and_grad", False)
            parts.forward_backward(
                forward_step_func=parts.forward_step,
                data_iterator=parts.data_iterator,
                model=parts.model,
                num_microbatches=after.num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.decoder_seq_length,
                forward_only=False,
            )

    @override
    def write_numbers(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        scalars = {f"moe-ft/{name}": value for name, value in numbers.items()}
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        if board:
            for name, value in scalars.items():
                board.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)
