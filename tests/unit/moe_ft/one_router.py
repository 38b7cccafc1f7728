"""A model of one MoE layer that is only Megatron's router, and the tokens that it routes."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

LAYER = "layer.0"
NUM_EXPERTS, TOP_K, NUM_TOKENS = 4, 2, 6


class Model(torch.nn.Module):
    """A decoder of one layer that is only a router."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        router: Any = TopKRouter(
            TransformerConfig(
                num_layers=1,
                hidden_size=8,
                num_attention_heads=1,
                num_moe_experts=NUM_EXPERTS,
                add_bias_linear=False,
                perform_initialization=False,
                moe_router_load_balancing_type="none",
                moe_router_topk=TOP_K,
                moe_token_dispatcher_type="alltoall",
                **settings,
            ),
            pg_collection=ProcessGroupCollection(tp=None, cp=None, tp_cp=None, tp_dp_cp=None),
        )
        router.gating = lambda tokens: tokens @ router.weight.T  # else it wants a GPU
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
        layer: Any = torch.nn.Module()
        layer.layer_number, layer.mlp = 1, torch.nn.Module()
        layer.mlp.router = router
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])

    @property
    def router(self) -> Any:
        """Megatron's router."""
        return self.decoder.layers[0].mlp.router

    def forward(self) -> None:
        """Route some tokens."""
        self.router(hidden())


def hidden(seed: int = 1) -> torch.Tensor:
    """Return the hidden states of some tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_TOKENS // 2, 2, 8, generator=generator, requires_grad=True)
