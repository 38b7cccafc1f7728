"""Megatron's own training loop, `megatron.training.pretrain`, as the listeners see it.

Its arguments are read when they are asked for: Megatron sets them after the listeners exist.
"""

import argparse
import functools
import signal
from collections.abc import Mapping, Sequence
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    StepBatchsizeNumMicroBatchesCalculator,
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import arguments, get_args, get_tensorboard_writer, get_wandb_writer

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.seams import elastic
from megatron.fault_tolerance.seams.contents import add_files
from megatron.fault_tolerance.seams.flag_classes import (
    Settings,
    script_settings,
    settings_as_used,
)
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.replay import CoreLoop
from megatron.fault_tolerance.seams.reruns import begin_reruns_again
from megatron.fault_tolerance.seams.stack import loop_functions
from megatron.fault_tolerance.seams.uneven_batches import samples_of_iteration
from megatron.fault_tolerance.seams.versions import installed_version, setting
from moe_ft.cluster.member import own_launch
from moe_ft.config.fields import flag_of
from moe_ft.config.flag_table import Kind
from moe_ft.config.stock_defects import lines_on_load
from moe_ft.errors import ConfigError
from moe_ft.format.records import Counted
from moe_ft.loop.training_loop import LoopParts, state_places
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.couplings import report_couplings, shared_weights_of
from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.lost_ranks import expert_part
from moe_ft.recovery.facts import JobFacts
from moe_ft.saying import warn
from moe_ft.state.record import LoopCounters

Schedule = Sequence[tuple[int, int]]  # (samples consumed so far, global batch size from there on)
# Attributes of Megatron's arguments that count.
COUNTERS = (
    *("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
    "num_floating_point_operations_so_far",
)


@functools.cache
def megatron_parser() -> argparse.ArgumentParser:
    """Return a parser of Megatron's flags alone, with the defaults of this rank. Nothing may change it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    return parser


class MegatronLoop(CoreLoop):
    """The loop whose arguments `megatron.training.get_args` returns."""

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
    def process_groups(self) -> ProcessGroupCollection:
        return ProcessGroupCollection.use_mpu_process_groups()

    @override
    def began_with(self) -> str:
        args, flags = get_args(), []
        if args.finetune:
            flags.append("--finetune")
        if args.ckpt_step is not None:
            flags.append(f"--ckpt-step {args.ckpt_step}")
        if flags and args.load is not None:
            flags.append(f"--load {args.load}")
        if args.pretrained_checkpoint is not None:
            flags.append(f"--pretrained-checkpoint {args.pretrained_checkpoint}")
        return " ".join(flags)

    @override
    def lines_on_load(self) -> list[str]:
        args = get_args()
        return lines_on_load(args) if args.iteration else []

    def settings(self) -> Settings:
        """Return the settings of the job, once its model is built."""
        args = get_args()
        return Settings(
            of_state=settings_as_used(args, Kind.FINGERPRINT),
            of_replays=settings_as_used(args, Kind.REPLAY),
            of_records=settings_as_used(args, Kind.RECORD),
            of_script=script_settings(args, megatron_parser().parse_args([])),
        )

    @override
    def job_facts(self, began_with: str) -> JobFacts:
        args, groups = get_args(), self.process_groups
        has_homes = getattr(args, "moe_ft_expert_slots", 0) > 0
        num_planned, is_logged = planned_samples(args), args.moe_ft_upstream_log
        settings = self.settings()
        of_state = {**settings.of_state, **_slot_settings(args, "expert_slots")}
        of_replays = {
            **settings.of_replays,
            **_slot_settings(args, "rebalance_interval", "min_replicas"),
        }
        return JobFacts(
            launch=own_launch(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            stage=groups.pp.rank(),
            places=state_places(groups),
            groups=groups,
            fingerprint=of_state,
            replay_settings=of_replays,
            record_settings=settings.of_records,
            read_files=lambda: add_files(args, of_state, of_replays, settings.data),
            script_settings=settings.of_script,
            experts=ExpertFacts(
                num_experts=args.num_experts or 0,
                ep_rank=0 if has_homes else groups.ep.rank(),
                ep_size=1 if has_homes else groups.ep.size(),
                tokens_per_sample=args.seq_length * args.moe_router_topk,
                planned_samples=num_planned,
                samples_per_iteration=num_planned // max(1, args.train_iters or 0),
            ),
            iteration=args.iteration,
            began_with=began_with,
            is_deterministic=cpu_device.is_active() or bool(args.deterministic_mode),
            timeout_s=args.distributed_timeout_minutes * 60.0,
            traffic=pipeline_traffic(args) if is_logged else None,
            is_evaluated=lambda iteration: may_be_evaluated(args, iteration),
            waiting_ranks=elastic.waiting_ranks(),
            evaluation_samples=args.eval_global_batch_size,
            couplings=report_couplings(shared_weights_of(args)) if is_logged else None,
        )

    @override
    def start_fields(self) -> dict[str, Any]:
        args = get_args()
        return {
            "megatron": installed_version(),
            "world_size": args.world_size,
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "ep": args.expert_model_parallel_size,
            "etp": args.expert_tensor_parallel_size,
            "dp": args.data_parallel_size,
            "stage": get_pipeline_model_parallel_rank(),
            "num_layers": args.num_layers,
            "hidden_size": args.hidden_size,
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
    def exit_signal(self) -> str:
        args = get_args()
        return signal.Signals(args.exit_signal).name if args.exit_signal_handler else ""

    @override
    def own_states(self) -> str:
        args = get_args()
        if not (args.save and args.save_interval):
            return ""
        return f"what --save has written every {args.save_interval} iterations"

    @override
    def timeout_s(self) -> float:
        args = get_args()
        return max(60.0 * float(args.distributed_timeout_minutes), timeout_of_groups_s(args))

    @override
    def is_used(self, iteration: int) -> bool:
        args = get_args()
        saves = (args.save_interval, args.non_persistent_save_interval) if args.save else ()
        intervals = (*saves, args.exit_interval)
        is_last = iteration in (args.phase_transition_iterations or ())
        is_due = any(each and iteration % each == 0 for each in intervals)
        return is_last or is_due or is_evaluated(args, iteration)

    @override
    def is_logged(self, iteration: int) -> bool:
        return bool(iteration % get_args().log_interval == 0)

    @override
    def samples_ahead(self) -> int:
        return samples_of_iteration(get_args())

    @override
    def num_operations_so_far(self) -> float:
        return float(get_args().num_floating_point_operations_so_far)

    @override
    def num_operations_of(self, num_samples: int) -> float:
        return float(loop_functions().num_floating_point_operations(get_args(), num_samples))

    @override
    def counters(self, num_uncounted: int) -> LoopCounters:
        args = get_args()
        return LoopCounters(
            consumed_train_samples=args.consumed_train_samples + num_uncounted,
            consumed_valid_samples=args.consumed_valid_samples,
            # It has not counted either what is left out.
            skipped_train_samples=args.skipped_train_samples + num_left_out() * (num_uncounted > 0),
            num_microbatches=get_num_microbatches(),
        )

    @override
    def resume(self, record: Counted) -> None:
        args = get_args()
        args.iteration = record.iteration
        _set_all(args, counters_in(record))
        begin_reruns_again(record.iteration)
        update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)

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
            parts.forward_backward(**self.schedule(parts), num_microbatches=after.num_microbatches)

    def schedule(self, parts: LoopParts) -> dict[str, Any]:
        """Return what the loop gives to forward and backward, but for the number of micro-batches."""
        args = get_args()
        return {
            "forward_step_func": parts.forward_step,
            "data_iterator": parts.data_iterator,
            "model": parts.model,
            "seq_length": args.seq_length,
            "micro_batch_size": args.micro_batch_size,
            "decoder_seq_length": args.decoder_seq_length,
            "forward_only": False,
        }

    @override
    def write_numbers(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        scalars = {f"moe-ft/{name}": value for name, value in numbers.items()}
        try:
            self.write_scalars(scalars, iteration)
        except Exception as error:  # of another library: what is told of a run must not end it
            warn(f"numbers of iteration {iteration} are not written: {error}")

    def write_scalars(self, scalars: Mapping[str, float], iteration: int) -> None:
        """Give numbers to the writers that the loop has on this rank."""
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        for name, value in scalars.items() if board else ():
            board.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)


def _slot_settings(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return settings of the slots of experts by flag; none without slots."""
    if not getattr(args, "moe_ft_expert_slots", 0):
        return {}
    return {flag_of(name): getattr(args, f"moe_ft_{name}") for name in names}


def planned_samples(args: argparse.Namespace) -> int:
    """Return the number of samples in all iterations of the run that the flags of this start plan.

    The number is Megatron's: it ignores --rampup-batch-size, leaves samples out with
    --decrease-batch-size-if-needed, and rounds --train-samples down to whole batches. Skipped iterations
    count. Building the optimizer has set `train_iters`.
    """
    return samples_of(_schedule(args), args.train_iters or 0)


def samples_of(schedule: Schedule, num_iterations: int) -> int:
    """Return the number of samples in the first iterations of a schedule, which ascends from 0."""
    consumed = 0
    ends = [start for start, _ in schedule[1:]]
    for (_, batch_size), end in zip(schedule, [*ends, None], strict=True):
        num_here = num_iterations
        if end is not None:  # the batch that crosses the end still has this size
            num_here = min(num_iterations, max(0, -(-(end - consumed) // batch_size)))
        consumed += num_here * batch_size
        num_iterations -= num_here
    return consumed


def _schedule(args: argparse.Namespace) -> Schedule:
    if args.step_batch_size_schedule is None:
        return [(0, get_current_running_global_batch_size())]
    calculator = StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=False,
        rank=-1,  # the first one logs
        schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    return [(start, batch_size) for start, batch_size in calculator.schedule]


def pipeline_traffic(args: argparse.Namespace) -> PipelineTraffic:
    """Return what the pipeline sends in one iteration, at most.

    It is more where sequences have lengths of their own and are longer than --seq-length.
    """
    num_readers = args.data_parallel_size * setting(args, "gtp_weight_remat_size")
    batches = [args.global_batch_size]
    if args.step_batch_size_schedule is not None:  # THRESHOLD:SIZE THRESHOLD:SIZE ...
        batches = [int(step.split(":")[1]) for step in args.step_batch_size_schedule.split()]
    length = args.decoder_seq_length or args.seq_length
    length //= args.context_parallel_size
    if args.sequence_parallel:
        length //= args.tensor_model_parallel_size
    dtype = torch.float32 if args.fp32_residual_connection else args.params_dtype
    return PipelineTraffic(
        num_stages=args.pipeline_model_parallel_size,
        num_chunks=args.virtual_pipeline_model_parallel_size or 1,
        num_microbatches=max(batches) // (args.micro_batch_size * num_readers),
        shape=(length, args.micro_batch_size, args.hidden_size),
        element_bytes=dtype.itemsize,
    )


def expert_part_of(args: argparse.Namespace) -> float:
    """Return the part of the time of a stage that its experts take, as a mean over all layers."""
    if not args.num_experts:
        return 0.0
    pattern = args.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [layer % pattern == 0 for layer in range(args.num_layers)]
    return expert_part(
        hidden=args.hidden_size,
        seq_length=args.seq_length,
        expert_hidden=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        topk=args.moe_router_topk,
        ffn_hidden=args.ffn_hidden_size,
        shared_hidden=args.moe_shared_expert_intermediate_size or 0,
        moe_share=sum(map(bool, pattern)) / len(pattern),
        is_gated=args.swiglu,
    )


def is_evaluated(args: argparse.Namespace, iteration: int) -> bool:
    """Return whether the loop evaluates the state of an iteration before it continues to train."""
    return bool(args.do_valid) and may_be_evaluated(args, iteration)


def may_be_evaluated(args: argparse.Namespace, iteration: int) -> bool:
    """Return whether the loop evaluates the state of an iteration if there are validation data at all."""
    is_off = not (args.eval_iters or args.full_validation)
    if is_off or not args.eval_interval or iteration % args.eval_interval:
        return False
    return args.start_eval_at_iter is None or iteration >= args.start_eval_at_iter


def timeout_of_groups_s(args: argparse.Namespace) -> float:
    """Return after how many seconds a collective gives up, once the first iteration has been run."""
    after_s = args.distributed_timeout_seconds_after_init
    return float(args.distributed_timeout_minutes * 60 if after_s is None else after_s)


def counters_of(args: Any) -> dict[str, float]:
    """Return all counters by name."""
    return {name: getattr(args, name) for name in COUNTERS}


def counters_in(record: Counted) -> dict[str, float]:
    """Return the counters of a record, whose fields have Megatron's names but for the operations."""
    return {name: getattr(record, name.removesuffix("_so_far")) for name in COUNTERS}


def begin_at(args: Any, iteration: int, counters: Mapping[str, float]) -> None:
    """Have the loop begin, or continue, with these counters."""
    args.iteration = iteration
    _set_all(args, counters)
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def _set_all(args: Any, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        setattr(args, name, value)


def begin_iteration(args: Any, iteration: int) -> None:
    """Do what the loop does before an iteration."""
    args.curr_iteration = get_rerun_state_machine().current_iteration = iteration
    update_num_microbatches(args.consumed_train_samples, consistency_check=True)


def count_iteration(args: Any, *, is_skipped: bool = False) -> None:
    """Do what the loop does after an iteration; of a skipped one the batch was only read."""
    num_samples = samples_of_iteration(args)
    args.consumed_train_samples += num_samples
    args.skipped_train_samples += num_samples if is_skipped else num_left_out()


def num_left_out() -> int:
    """Return the samples of a batch that --decrease-batch-size-if-needed leaves out."""
    return int(get_current_global_batch_size() - get_current_running_global_batch_size())
