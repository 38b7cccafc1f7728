"""Slots of experts in pretrain_gpt_moe.py: what they cannot be used with, their layout, the model's spec."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.fault_tolerance.seams.refusals import refused_flag_with, refused_with
from megatron.fault_tolerance.seams.settings import config_from_arguments
from moe_ft.config.fields import flag_of
from moe_ft.config.rules import Rule
from moe_ft.elastic.slot_layer import with_slots

_UNTESTED = "nobody has tried it"
_SAVED = (
    "Megatron's checkpoints hold experts, and homes have parts; `moe_ft convert` makes one of what is in "
    "--moe-ft-persist-dir"
)


def num_ranks(args: argparse.Namespace) -> int:
    """Return the expert-parallel ranks of a job with slots: all ranks of a pipeline stage."""
    return int(args.world_size // args.pipeline_model_parallel_size)


_refused = partial(refused_with, "expert_slots")


def _refused_flag(dest: str, reason: str = _UNTESTED, flag: str = "") -> Rule:
    return refused_flag_with("expert_slots", dest, reason, flag)


def _num_slots(args: argparse.Namespace) -> int:
    return num_ranks(args) * int(args.moe_ft_expert_slots)


SLOT_REFUSALS: tuple[Rule, ...] = (
    _refused(
        lambda args: not args.num_experts,
        "needs --num-experts",
        "the model has no experts",
        "Give their number, or leave the flag out",
    ),
    _refused(
        lambda args: args.expert_model_parallel_size not in (1, num_ranks(args)),
        "needs all ranks of a pipeline stage in one expert-parallel group",
        "every rank has a part of every expert",
        "Leave --expert-model-parallel-size out",
    ),
    _refused(
        lambda args: (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) > 1,
        "needs --expert-tensor-parallel-size 1",
        "a slot holds a whole expert",
        "Give it",
    ),
    _refused(
        lambda args: _num_slots(args) < args.num_experts,
        "gives fewer slots than --num-experts",
        "every expert of a layer needs one",
        "Give more, or start more ranks",
    ),
    _refused(
        lambda args: _num_slots(args) < args.num_experts * args.moe_ft_min_replicas,
        f"gives too few slots for {flag_of('min_replicas')}",
        "every expert of a layer needs as many",
        "Give more slots, or fewer replicas",
    ),
    _refused(
        lambda args: args.transformer_impl != "local",
        "needs --transformer-impl local",
        "homes take weights and gradients of single experts, and it may keep them in FP8, in one tensor, or "
        "add gradients up itself",
        "Give it, or leave the flag out",
    ),
    _refused(
        lambda args: args.optimizer != "adam",
        "needs --optimizer adam",
        "homes are parts of experts, and not the matrices that other optimizers need",
        "Give it, or leave the flag out",
    ),
    _refused_flag(
        "moe_grouped_gemm", "its experts are no modules of their own, from which homes copy"
    ),
    _refused(
        lambda args: (
            args.moe_token_dispatcher_type == "flex"
            and args.moe_flex_dispatcher_backend == "ncclep"
        ),
        "cannot be used with --moe-flex-dispatcher-backend ncclep",
        _UNTESTED,
        "Use deepep or hybridep",
    ),
    _refused_flag("moe_pad_expert_input_to_capacity", "replicas share the tokens of an expert"),
    _refused(
        lambda args: args.moe_ft_capacity_boost,
        f"cannot be used with {flag_of('capacity_boost')}",
        "the capacity of an expert is that of its slots",
    ),
    _refused(
        lambda args: args.cuda_graph_impl not in (None, "none"),
        "needs --cuda-graph-impl none",
        "dispatch reads counts on the host",
        "Give it, or leave the flag out",
    ),
    _refused_flag("skip_train", "nothing fills the slots without an optimizer"),
    _refused_flag("fp8", flag="--fp8-format"),
    _refused_flag("fp4", flag="--fp4-format"),
    _refused_flag("optimizer_cpu_offload"),
    _refused_flag("offload_optimizer_states"),
    _refused_flag("chunked_optimizer_state_offload"),
    _refused_flag("moe_latent_size"),
    _refused_flag("delay_wgrad_compute"),
    _refused_flag("overlap_moe_expert_parallel_comm"),
    _refused_flag("overlap_dispatch_backward_with_experts_wgrad"),
    _refused_flag("overlap_param_gather_with_optimizer_step"),
    _refused_flag("log_params_norm", "it would add up slots and homes"),
    _refused_flag("log_num_zeros_in_grad", "it would count the padding of homes"),
    _refused_flag(
        "mtp_num_layers", "Megatron builds its layers from a spec of its own, without slots"
    ),
    _refused_flag("spec", "slots go into Megatron's own spec of the layers"),
    _refused_flag("save", _SAVED),
    _refused_flag("non_persistent_save_interval", _SAVED),
    _refused_flag("load", _SAVED),
    _refused_flag("pretrained_checkpoint", _SAVED),
)


def complete(args: argparse.Namespace) -> None:
    """Put all ranks of a pipeline stage into one expert-parallel group.

    Their number need not divide the experts, which Megatron's validation asks for.
    """
    if args.moe_ft_expert_slots:
        args.expert_model_parallel_size = num_ranks(args)


def layer_spec_of(args: argparse.Namespace, spec: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes the spec of a stage's layers, with slots if the arguments ask for them."""
    if not args.moe_ft_expert_slots:
        return spec
    settings = config_from_arguments(args).elastic

    def slotted(config: Any, vp_stage: int | None = None) -> Any:
        return with_slots(spec(config, vp_stage), settings)

    return slotted
