"""Jobs in which peers cannot share micro-batches, each with the reason and the remedy."""

import argparse
from functools import partial
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.fault_tolerance.seams.refusals import refused_flag
from moe_ft.config.rules import check_rules

_rule = partial(refused_flag, problem="does not work where peers share micro-batches")
_FORWARD = "each forward pass waits for a collective of all data-parallel ranks"
_CHUNKS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)


def _has_virtual_stages(args: Any) -> bool:
    """Return whether ranks have several stages, before or after Megatron's validation."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        num_stages = args.pipeline_model_parallel_size
        layout = PipelineParallelLayerLayout.from_str(layout, num_stages)
    is_several = layout is not None and layout.virtual_pipeline_model_parallel_size > 1
    return is_several or any(getattr(args, name, None) for name in _CHUNKS)


_RULES = (
    _rule(
        "",
        "schedules of virtual stages are not planned",
        flag="a layout with virtual stages",
        remedy="Use one stage a rank",
        is_broken=_has_virtual_stages,
    ),
    _rule("overlap_moe_expert_parallel_comm", "its schedule runs two micro-batches as one"),
    _rule("fine_grained_activation_offloading", "it counts on the usual order"),
    _rule(
        "cuda_graph_impl",
        "graphs are captured for the usual order",
        is_broken=lambda args: args.cuda_graph_impl not in (None, "none"),
    ),
    _rule(
        "moe_router_load_balancing_type",
        _FORWARD,
        is_broken=lambda args: "global_aux_loss" in args.moe_router_load_balancing_type,
        remedy="Use aux_loss",
    ),
    _rule(
        "fp8_recipe",
        _FORWARD,
        is_broken=lambda args: bool(getattr(args, "fp8", None)) and args.fp8_recipe == "delayed",
        remedy="Use another recipe",
    ),
    _rule("variable_seq_lengths", "stages expect tensors of one shape"),
    _rule(
        "dataloader_type",
        "its samples cannot be read by number",
        is_broken=lambda args: args.dataloader_type not in (None, "single"),
        remedy="Use --dataloader-type single",
    ),
)


def check_job(args: argparse.Namespace) -> None:
    """Raise ConfigError unless peers can share micro-batches in a job with Megatron's arguments."""
    check_rules(_RULES, args)
