"""Megatron's own training loop, `megatron.training.pretrain`, as the listeners see it.

Its arguments are read when they are asked for: Megatron sets them after the listeners exist. Most of the work
is loop_facts.py.
"""

from collections.abc import Mapping
from typing import Any

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
    def num_experts(self) -> int:
        """--num-experts."""
        return int(get_args().num_experts or 0)

    @property
    def train_iterations(self) -> int | None:
        """--train-iters, which Megatron also derives from --train-samples."""
        iterations: int | None = get_args().train_iters
        return iterations

    @property
    def sequence_length(self) -> int:
        """--seq-length."""
        return int(get_args().seq_length)

    @property
    def iteration(self) -> int:
        """The iteration that Megatron has loaded, or `resume` has set."""
        return int(get_args().iteration)

    def began_with(self) -> str:
        """Return the flags that begin a run from the weights of another."""
        return loop_facts.began_with(get_args())

    def job_facts(self, began_with: str) -> JobFacts:
        """Return the facts of the job."""
        return loop_facts.job_facts(get_args(), began_with)

    def start_fields(self) -> dict[str, Any]:
        """Return the layout of the job."""
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

    def sample_counters(self, num_uncounted: int) -> dict[str, int]:
        """Return the samples of training and validation."""
        args = get_args()
        return {
            "consumed_train_samples": args.consumed_train_samples + num_uncounted,
            "consumed_valid_samples": args.consumed_valid_samples,
        }

    def is_used(self, iteration: int) -> bool:
        """Return whether an interval of evaluations, saves or exits names the iteration."""
        args = get_args()
        is_saved_or_last = loop_facts.is_saved_or_last(args, iteration)
        return is_saved_or_last or loop_facts.is_evaluated(args, iteration)

    def is_logged(self, iteration: int) -> bool:
        """Return whether --log-interval names the iteration."""
        return bool(iteration % get_args().log_interval == 0)

    def samples_ahead(self) -> int:
        """Return the samples that the whole job reads in the current iteration."""
        return loop_facts.samples_of_iteration(get_args())

    def num_operations_so_far(self) -> float:
        """Return Megatron's count."""
        return float(get_args().num_floating_point_operations_so_far)

    def num_operations_of(self, num_samples: int) -> float:
        """Return the operations of one batch, as Megatron counts them."""
        return float(num_floating_point_operations(get_args(), num_samples))

    def counters(self, num_uncounted: int) -> LoopCounters:
        """Return Megatron's counters."""
        return loop_facts.counters(get_args(), num_uncounted)

    def resume(self, record: Counted) -> None:
        """Set Megatron's counters, before the data iterators are built from them."""
        loop_facts.resume(get_args(), record)

    def set_data_position(self, consumed_samples: int) -> None:
        """Set Megatron's counter of training samples."""
        get_args().consumed_train_samples = consumed_samples

    def run_forward_backward(self, parts: LoopParts, before: Counted, after: Counted) -> None:
        """Run Megatron's schedule, with the arguments of its train_step. Called by all ranks."""
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

    def write_numbers(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        """Write to the TensorBoard and W&B writers of Megatron, on the rank that has them."""
        scalars = {f"moe-ft/{name}": value for name, value in numbers.items()}
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        if board:
            for name, value in scalars.items():
                board.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)
