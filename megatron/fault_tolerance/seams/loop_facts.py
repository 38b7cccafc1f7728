"""Connects moe_ft's checkpointing with Megatron's loop: its arguments, counters and process groups.

What is done with them is moe_ft/recovery/session.py; when, is run.py.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.program.flag_classes import Kind, names_of
from megatron.fault_tolerance.program.planned_samples import planned_samples
from moe_ft.format.records import IterationRecord
from moe_ft.planning.experts import ExpertFacts
from moe_ft.recovery.facts import JobFacts
from moe_ft.state.parameters import GroupPlace, StatePlaces
from moe_ft.state.record import IterationFacts

# Of paths the last part counts: where files lie may change.
_PATH_LISTS = frozenset({"data_path", "train_data_path"})
_PATHS = frozenset(
    {
        *("tokenizer_model", "vocab_file", "merge_file", "metadata_path"),
        *("te_precision_config_file", "heterogeneous_layers_config_path"),
        *("nccl_communicator_config_path", "tp_comm_overlap_cfg"),
    }
)
# Files that list paths, with weights: what they say counts.
_LISTING_FILES = frozenset({"data_args_path", "per_split_data_args_path"})


def fingerprint(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the training state depends on, by flag, as JSON values.

    State of a run that differs in one of them is another run's. Call it after Megatron's validation.
    """
    return _values_of(args, Kind.FINGERPRINT)


def replay_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that an iteration which is run again must share, by flag, as JSON values.

    Those of the fingerprint are not repeated. Call it after Megatron's validation.
    """
    return _values_of(args, Kind.REPLAY)


def _values_of(args: argparse.Namespace, kind: Kind) -> dict[str, Any]:
    return {  # what a Megatron does not have is left out, so that it is compared with nothing
        "--" + name.replace("_", "-"): _as_used(name, _setting(name, getattr(args, name)), args)
        for name in names_of(kind)
        if hasattr(args, name)
    }


def _as_used(name: str, value: Any, args: argparse.Namespace) -> Any:
    """Return what Megatron's configuration makes of a value, which may be written in several ways."""
    if name == "cp_comm_type" and isinstance(value, list) and len(value) == 1:
        return value[0]
    if name == "microbatch_group_size_per_vp_stage" and value is None:
        return args.pipeline_model_parallel_size
    if name == "moe_expert_capacity_factor" and value is not None and value < 0:
        return None
    if name == "decoupled_lr":  # given or not divides the parameters; the rate itself may change
        return value is not None
    return value


def _setting(name: str, value: Any) -> Any:
    if name in _PATH_LISTS:
        return [_last_part(str(word)) for word in value or ()]
    if name in _PATHS and value is not None:
        return _last_part(value)
    if name in _LISTING_FILES and value is not None:
        words = re.findall(r"[^\s\"\[\]{}:,]+", Path(value).read_text(encoding="utf-8"))
        return [_last_part(word) for word in words]
    return _as_json(value)


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def job_facts(args: argparse.Namespace, began: str) -> JobFacts:
    """Return what checkpointing needs to know about the job; the model is built.

    Args:
        args: Megatron's arguments.
        began: of `began_with`, before the model was built.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    num_planned = planned_samples(args)
    places = StatePlaces(
        dp=_place(groups.dp_cp),
        expt_dp=_place(groups.expt_dp),
        tp=_place(groups.tp),
        expt_tp=_place(groups.expt_tp),
    )
    return JobFacts(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        stage=groups.pp.rank(),
        places=places,
        groups=groups,
        fingerprint=fingerprint(args),
        replay_settings=replay_settings(args),
        experts=ExpertFacts(
            num_experts=args.num_experts or 0,
            ep_rank=groups.ep.rank(),
            ep_size=groups.ep.size(),
            tokens_per_sample=args.seq_length * args.moe_router_topk,
            planned_samples=num_planned,
            samples_per_iteration=num_planned // max(1, args.train_iters or 0),
        ),
        iteration=args.iteration,
        began_with=began,
        is_deterministic=cpu_device.is_active() or bool(args.deterministic_mode),
        timeout_s=args.distributed_timeout_minutes * 60.0,
    )


def began_with(args: argparse.Namespace) -> str:
    """Return the flags that begin a run from a checkpoint of another, with values; empty without.

    Call it before the model is built: where --load has nothing yet, Megatron itself sets --finetune then.
    """
    flags = []
    if args.finetune:
        flags.append("--finetune")
    if args.ckpt_step is not None:
        flags.append(f"--ckpt-step {args.ckpt_step}")
    if flags and args.load is not None:
        flags.append(f"--load {args.load}")
    if args.pretrained_checkpoint is not None:
        flags.append(f"--pretrained-checkpoint {args.pretrained_checkpoint}")
    return " ".join(flags)


def _place(group: Any) -> GroupPlace:
    return GroupPlace(rank=group.rank(), size=group.size())


def iteration_facts(
    args: argparse.Namespace,
    iteration: int,
    *,
    grad_norm: float | None,
    num_tokens: torch.Tensor | None,
    num_samples: int = 0,
    num_floating_point_operations: float,
    tokens_per_expert: dict[str, torch.Tensor],
) -> IterationFacts:
    """Return the counters of the state that an iteration has just made.

    Args:
        args: Megatron's arguments.
        iteration: the state's now.
        grad_norm: what train_step returned.
        num_tokens: of the batch, with --calculate-per-token-loss.
        num_samples: of the iteration, if the loop has not counted them yet; nor has it counted those that
            --decrease-batch-size-if-needed leaves out then.
        num_floating_point_operations: so far, this iteration included.
        tokens_per_expert: of this rank.
    """
    num_left_out = get_current_global_batch_size() - get_current_running_global_batch_size()
    return IterationFacts(
        iteration=iteration,
        grad_norm=None if grad_norm is None else float(grad_norm),
        num_tokens=num_tokens,
        consumed_train_samples=args.consumed_train_samples + num_samples,
        consumed_valid_samples=args.consumed_valid_samples,
        skipped_train_samples=args.skipped_train_samples + num_left_out * (num_samples > 0),
        num_floating_point_operations=num_floating_point_operations,
        num_microbatches=get_num_microbatches(),
        tokens_per_expert=tokens_per_expert,
    )


def is_evaluated(args: argparse.Namespace, iteration: int) -> bool:
    """Return whether the loop evaluates the state of an iteration before it trains on."""
    if not args.do_valid or not args.eval_interval or iteration % args.eval_interval:
        return False
    return args.start_eval_at_iter is None or iteration >= args.start_eval_at_iter


def resume(args: argparse.Namespace, record: IterationRecord) -> None:
    """Set the counters of the training loop, before the data iterators are built from them."""
    args.iteration = record.iteration
    args.consumed_train_samples = record.consumed_train_samples
    args.consumed_valid_samples = record.consumed_valid_samples
    args.skipped_train_samples = record.skipped_train_samples
    args.num_floating_point_operations_so_far = record.num_floating_point_operations
    update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
