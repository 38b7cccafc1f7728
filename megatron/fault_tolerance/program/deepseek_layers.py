"""Layers of DeepSeek's models where Megatron's compute other numbers (Megatron 0.19.2).

Megatron's `--spec MODULE NAME` takes them, with any implementation:

    --spec megatron.fault_tolerance.program.deepseek_layers layer_spec

With groups of experts and softmax scores, as in DeepSeek-V2, a group has the score of its best expert;
Megatron adds the scores of several. Without --q-lora-rank, as in DeepSeek-V2-Lite, --qk-layernorm is for keys
and values alone; Megatron normalizes the input of the queries a second time. Layers of multi-token prediction
stay Megatron's: `--spec` does not reach them. --yarn-beta-fast and the like, which Megatron reads without
multi-latent attention alone, are read, as Kimi-K2 needs them.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.training import global_vars

from megatron.fault_tolerance.program import model
from megatron.fault_tolerance.program.local_attention import LatentAttention
from moe_ft.command_lines import as_flag
from moe_ft.errors import ConfigError

TopK = tuple[torch.Tensor, torch.Tensor]


class BestOfGroups:
    """Choice of experts from the groups whose best experts have the highest scores."""

    layer_number: int | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int,
        group_topk: int,
        compute: Callable[[torch.Tensor, int], TopK],
    ) -> TopK:
        """Return scores and numbers [tokens, topk] of the chosen experts; Megatron calls it in a router.

        Args:
            scores: [tokens, experts].
        """
        by_group = scores.unflatten(1, (num_groups, -1))
        chosen = by_group.amax(dim=-1).topk(group_topk, dim=-1).indices
        is_left = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, chosen, False)
        left = by_group.masked_fill(is_left[..., None], -torch.inf)
        return compute(left.flatten(1), topk)


class BestOfGroupsRouter(TopKRouter):  # type: ignore[misc]
    """Router that chooses from the best groups, where Megatron would replay an earlier choice."""

    def __init__(self, config: Any, **options: Any) -> None:
        """Build Megatron's router; it calls this with these names of arguments.

        Raises:
            ConfigError: if a kernel or a record of choices would decide.
        """
        super().__init__(config=config, **options)
        for flag in ("moe_router_fusion", "moe_enable_routing_replay"):
            if getattr(config, flag):
                name = as_flag(flag)
                raise ConfigError(f"{name} must be off with --spec {__name__} layer_spec.")
        self.router_replay = BestOfGroups()


def _read_yarn(transformer: Any) -> None:
    """Give a configuration the values of YaRN on the command line, before layers are built from it."""
    args = global_vars._GLOBAL_ARGS
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        value = getattr(args, f"yarn_{name}", None)
        if value is not None:
            setattr(transformer, name, value)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's spec of a virtual stage with these layers."""
    spec = model.layer_spec(config, vp_stage)
    transformer = config.transformer
    _read_yarn(transformer)
    has_groups = transformer.moe_router_group_topk and (
        transformer.moe_router_score_function == "softmax"
    )
    for layer in spec.layer_specs:
        attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
        if attention.module is MLASelfAttention:
            attention.module = LatentAttention
        if has_groups and isinstance(mlp, partial) and mlp.func is MoELayer:
            parts = dataclasses.replace(mlp.keywords["submodules"], router=BestOfGroupsRouter)
            layer.submodules.mlp = partial(mlp, submodules=parts)
    return spec
