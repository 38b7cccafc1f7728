"""Connects moe_ft's checkpointing with Megatron's loop: its arguments, counters and process groups.

What is done with them is moe_ft/recovery/session.py; when, is run.py.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import core_transformer_config_from_args

from megatron.fault_tolerance import cpu_device
from moe_ft.record_formats import IterationRecord
from moe_ft.recovery.assembly import ExpertFacts
from moe_ft.recovery.job import JobFacts
from moe_ft.state.parameters import GroupPlace, StatePlaces
from moe_ft.state.record import IterationFacts

# What decides the shape and meaning of the state: a checkpoint of a run that differs in one of them is
# another run's. Learning rates, batch sizes and lengths may change from start to start.
_FINGERPRINT = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "multi_latent_attention",
    "qk_layernorm",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
    "moe_grouped_gemm",
    "mtp_num_layers",
    "swiglu",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "position_embedding_type",
    "max_position_embeddings",
    "untie_embeddings_and_output_weights",
    "padded_vocab_size",
    "seq_length",
    "transformer_impl",
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "optimizer",
    "use_distributed_optimizer",
    "use_precision_aware_optimizer",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "bf16",
    "fp16",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "data_path",
    "train_data_path",
    "split",
    "seed",
)

# What decides besides what an iteration computes, beyond Megatron's TransformerConfig: one that is run again
# must have the same.
_REPLAY_SETTINGS = (
    "global_batch_size",
    "micro_batch_size",
    "step_batch_size_schedule",
    "decrease_batch_size_if_needed",
    "clip_grad",
    "accumulate_allreduce_grads_in_fp32",
    "grad_reduce_in_bf16",
    "main_grads_dtype",
    "decoupled_weight_decay",
    "dataloader_type",
    "data_sharding",
    "eod_mask_loss",
    "reset_position_ids",
    "reset_attention_mask",
    "create_attention_mask_in_dataloader",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "squared_relu",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "apply_layernorm_1p",
    "norm_epsilon",
)
# Of the TransformerConfig what may change: how something is computed, not what.
_FREE_SETTINGS = (
    "recompute_",
    "overlap_",
    "tp_comm_",
    "cpu_offloading",
    "cuda_graph",
    "distribute_saved_activations",
    "batch_p2p_",
    "barrier_",
    "perform_initialization",
    "use_cpu_initialization",
    "moe_per_layer_logging",
)


def fingerprint(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the training state depends on, by flag, as JSON values."""
    values = _values_of(args, _FINGERPRINT)
    for flag in ("--data-path", "--train-data-path"):  # where the data lies may change
        words = getattr(args, flag[2:].replace("-", "_")) or ()
        values[flag] = [str(word).rpartition("/")[2] for word in words]
    return {flag: _as_json(value) for flag, value in values.items()}


def replay_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that an iteration which is run again must share, by flag, as JSON values."""
    values = {flag: _as_json(value) for flag, value in _values_of(args, _REPLAY_SETTINGS).items()}
    config = core_transformer_config_from_args(args)
    for each in fields(config):
        value = getattr(config, each.name)
        if callable(value):  # an activation or an initialization
            value = getattr(value, "__name__", None)
        is_plain = value is None or isinstance(value, bool | int | float | str | list | tuple)
        if is_plain and not each.name.startswith(_FREE_SETTINGS):
            values["--" + each.name.replace("_", "-")] = _as_json(value)
    return values


def _values_of(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {"--" + name.replace("_", "-"): getattr(args, name, None) for name in names}


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
            ep=_place(groups.ep),
            tokens_per_sample=args.seq_length * args.moe_router_topk,
            planned_samples=args.train_samples or (args.train_iters or 0) * args.global_batch_size,
            samples_per_iteration=args.global_batch_size,
            capacity=_expert_capacity(args),
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


def _expert_capacity(args: argparse.Namespace) -> float:
    """Return how many tokens of a sequence an expert takes at most; Megatron has one limit for all."""
    factor = args.moe_expert_capacity_factor
    if not factor or not args.num_experts:
        return 1.0
    tokens = args.seq_length * args.moe_router_topk / args.num_experts
    return float(factor * tokens)


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
        num_samples: of the iteration, if the loop has not counted them yet.
        num_floating_point_operations: so far, this iteration included.
        tokens_per_expert: of this rank.
    """
    return IterationFacts(
        iteration=iteration,
        grad_norm=None if grad_norm is None else float(grad_norm),
        num_tokens=None if num_tokens is None else int(num_tokens),
        consumed_train_samples=args.consumed_train_samples + num_samples,
        consumed_valid_samples=args.consumed_valid_samples,
        skipped_train_samples=args.skipped_train_samples,
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
