"""Jobs in which peers cannot play the roles of lost ranks, each with the reason and the remedy."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron.fault_tolerance.degraded.roles import RolePlace, layout_of_job
from megatron.fault_tolerance.seams.refusals import refused_flag
from moe_ft.arithmetic import ceil_div
from moe_ft.config.rules import check_rules
from moe_ft.errors import ConfigError
from moe_ft.planning.lost_ranks import RoleMemory
from moe_ft.planning.report import megabytes
from moe_ft.planning.schedules import Pipelines, plan_schedule
from moe_ft.strategies.registry import kinds

_PROBLEM = "does not work with peers that play the role of a lost rank"
_BROKEN = "a sum along its pipeline misses it"
_IN_FORWARD = "each forward pass waits for a collective with the lost rank"
_OVERLAP = "the collectives of live ranks do not overlap with anything yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Bytes on the device of a rank: of weights, gradients and optimizer, and of a whole iteration's rest."""

    state: int
    activations: int


_rule = partial(refused_flag, problem=_PROBLEM)
_WHOLE = tuple(each.name for each in kinds() if each.is_exact and not each.replays)
_RULES = (
    _rule(
        "optimizer",
        "its ranks have whole matrices, which are not built again",
        is_broken=lambda args: args.optimizer != "adam",
        remedy="Use --optimizer adam",
    ),
    _rule(
        "",
        "each of its ranks has the whole optimizer, and their norms are summed along the pipelines",
        is_broken=lambda args: not args.use_distributed_optimizer,
        flag="no --use-distributed-optimizer",
        remedy="Add --use-distributed-optimizer",
    ),
    _rule(
        "",
        _BROKEN,
        is_broken=lambda args: (
            not args.untie_embeddings_and_output_weights and args.pipeline_model_parallel_size > 1
        ),
        flag="no --untie-embeddings-and-output-weights",
        remedy="Add --untie-embeddings-and-output-weights",
    ),
    _rule("mtp_num_layers", _BROKEN),
    _rule(
        "context_parallel_size",
        "such jobs have ended in other weights, and it is not known why",
        is_broken=lambda args: args.context_parallel_size > 1,
        remedy="Use tensor parallelism",
    ),
    _rule(
        "virtual_pipeline_model_parallel_size",
        "schedules of virtual stages are not planned",
        flag="a layout with virtual stages",
        remedy="Use one stage a rank",
    ),
    _rule("overlap_moe_expert_parallel_comm", "its schedule runs two micro-batches as one"),
    _rule(
        "cuda_graph_impl",
        "graphs are captured for the usual order",
        is_broken=lambda args: args.cuda_graph_impl not in (None, "none"),
    ),
    _rule(
        "moe_router_load_balancing_type",
        _IN_FORWARD,
        is_broken=lambda args: "global_aux_loss" in args.moe_router_load_balancing_type,
        remedy="Use aux_loss",
    ),
    _rule(
        "fp16", "its check for overflows takes a collective for each optimizer", remedy="Use bf16"
    ),
    _rule("data_parallel_random_init", "each data-parallel rank draws other random numbers"),
    _rule("log_num_zeros_in_grad", "zeros are counted for each optimizer"),
    _rule("log_params_norm", "the shard of the lost rank is not in the sum"),
    _rule("exit_signal_handler", "its collective after each iteration waits for the lost rank"),
    _rule(
        "check_weight_hash_across_dp_replicas_interval",
        "its collective waits for the lost rank",
        is_broken=lambda args: args.check_weight_hash_across_dp_replicas_interval is not None,
    ),
    _rule(
        "moe_token_dispatcher_type",
        "all ranks of a group make its buffers, the lost one too",
        is_broken=lambda args: args.moe_token_dispatcher_type == "flex",
        remedy="Use alltoall",
    ),
    _rule("overlap_grad_reduce", _OVERLAP),
    _rule("overlap_param_gather", _OVERLAP),
    _rule("ddp_average_in_collective", "the mean would be that of the live ranks"),
    _rule("reduce_scatter_with_fp32_accumulation", "it is made of collectives without an answer"),
    _rule("use_precision_aware_optimizer", "shards of it are not built again"),
    _rule(
        "fp8_param_gather",
        "casting the weights of a played role takes collectives that the others do not join",
    ),
    _rule("optimizer_cpu_offload", "shards of it are not built again"),
    _rule("offload_optimizer_states", "shards of it are not built again"),
    _rule("chunked_optimizer_state_offload", "shards of it are not built again"),
    _rule("variable_seq_lengths", "stages expect tensors of one shape"),
    _rule("num_microbatches_with_partial_activation_checkpoints", "it counts the usual order"),
    _rule("fine_grained_activation_offloading", "it counts the usual order"),
    _rule("defer_embedding_wgrad_compute", "it keeps gradients of the usual order"),
    _rule("use_tp_pp_dp_mapping", "stages are then not the outermost dimension of ranks"),
    _rule(
        "dataloader_type",
        "its samples cannot be read by number",
        is_broken=lambda args: args.dataloader_type != "single",
        remedy="Use --dataloader-type single",
    ),
    _rule(
        "moe_ft_strategy",
        "deputies need snapshots that hold the whole state of a rank",
        is_broken=lambda args: args.moe_ft_strategy not in _WHOLE,
        remedy=f"Use --moe-ft-strategy {' or '.join(_WHOLE)}",
    ),
    _rule("moe_ft_upstream_log", "a deputy logs what it sends for two ranks as one"),
    _rule("moe_ft_breakpoints", "the deputy of a rank leaves none for it"),
    _rule(
        "moe_ft_replicate",
        "the gradients of a played role are not kept",
        is_broken=lambda args: args.moe_ft_replicate != "state",
    ),
    _rule("save", "a checkpoint of Megatron's takes all ranks", remedy="Use --moe-ft-persist-dir"),
    _rule(
        "eval_iters",
        "evaluations run the usual schedule, which takes all ranks",
        is_broken=lambda args: bool(args.eval_iters) or bool(args.full_validation),
        remedy="Give --eval-iters 0",
    ),
)


def check_weights(model: Sequence[Any]) -> None:
    """Raise ConfigError if weights are frozen.

    Args:
        model: chunks of this rank.
    """
    if any(not each.requires_grad for chunk in model for each in chunk.parameters()):
        raise ConfigError(
            f"a model with frozen weights {_PROBLEM}: all ranks keep these together. Train all weights, or "
            "leave --moe-ft-without-spare out."
        )


def memory_of_role(model: Sequence[Any]) -> RoleMemory:
    """Return what this rank needs to play another role of its stage.

    Args:
        model: the one chunk of this rank, as DDP wraps it.
    """
    (chunk,) = model
    elements = owned = 0
    for each in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        in_group = sum(bucket.grad_data.numel() for bucket in each.buckets)
        elements += in_group
        owned += ceil_div(in_group, each.intra_distributed_optimizer_instance_group.size())
    return RoleMemory(gradients=4 * elements, shard=12 * owned)


def check_room(
    args: argparse.Namespace, model: Sequence[Any], rank: int, used: Usage, limit: int
) -> None:
    """Raise ConfigError unless this rank has the memory to play the role of one other group.

    Args:
        limit: bytes of its device; 0 if they are not known.
    """
    layout, role = layout_of_job(args), memory_of_role(model)
    stage, num_micro_batches = RolePlace(layout, rank).role[1], get_num_microbatches()
    pipelines = Pipelines(
        num_stages=layout.num_stages, num_pipelines=2, num_micro_batches=num_micro_batches
    )
    # Where there are more pipelines, the others run as if nothing had happened.
    schedule = plan_schedule(pipelines, frozenset({(1, stage)}), is_whole=True)
    held = min(layout.num_stages - stage, num_micro_batches)
    more = schedule.most_held[0, stage] - held
    activations = ceil_div(used.activations * more, held)
    needed = used.state + used.activations + role.total() + activations
    if limit and needed > limit:
        raise ConfigError(
            f"peers cannot play the role of a lost rank: rank {rank} has {megabytes(limit)} MB and needs "
            f"{megabytes(needed)}: {megabytes(role.gradients)} for gradients of the role, "
            f"{megabytes(role.shard)} for its part of the optimizer and {megabytes(activations)} for "
            f"{more} micro-batches more, besides {megabytes(used.state + used.activations)} of "
            "its own. Use smaller micro-batches, recompute activations, or add data-parallel ranks."
        )


def check_job(args: argparse.Namespace) -> None:
    """Raise ConfigError unless peers can play the role of a lost rank in a job with Megatron's arguments."""
    check_rules(_RULES, args)
    layout = layout_of_job(args)
    if layout.refusal:
        raise ConfigError(
            f"peers cannot play the role of a lost rank: {layout.refusal}. Give the job more data-parallel "
            "ranks."
        )
