"""Models for tests of sizes."""

from hypothesis import strategies as st

from benchmarks.paper_models import evenly_spaced_layers
from moe_ft.planning.model_size import LatentAttention, ModelShape

# 2 MoE layers of 4 experts with 10 parameters each (width 1, no biases).
TINY = ModelShape(
    num_layers=2,
    hidden_size=1,
    num_experts=4,
    moe_layers=(0, 1),
    moe_ffn_hidden_size=5,
    has_bias=False,
    has_norm_bias=False,
    vocab_size=1,
    num_positions=0,
)


@st.composite
def shapes(draw: st.DrawFn, ep: int) -> ModelShape:
    """Draw a small model whose experts can be divided among ``ep`` ranks."""
    num_layers = draw(st.integers(1, 5))
    return ModelShape(
        num_layers=num_layers,
        hidden_size=draw(st.integers(1, 5)),
        num_experts=ep * draw(st.integers(1, 3)),
        moe_layers=evenly_spaced_layers(num_layers, draw(st.integers(1, num_layers))),
        vocab_size=draw(st.integers(0, 60)),
        num_positions=0,
    )


@st.composite
def any_shapes(draw: st.DrawFn) -> ModelShape:
    """Draw a small model of any kind."""
    num_layers = draw(st.integers(1, 5))
    groups = draw(st.integers(1, 3))
    sizes = st.integers(1, 4)
    latent = LatentAttention(
        query_rank=draw(st.integers(0, 3)),
        key_value_rank=draw(sizes),
        head_width=draw(sizes),
        position_width=draw(sizes),
        value_width=draw(sizes),
    )
    return ModelShape(
        num_layers=num_layers,
        hidden_size=draw(st.integers(1, 9)),
        num_experts=draw(st.integers(1, 6)),
        moe_layers=evenly_spaced_layers(num_layers, draw(st.integers(0, num_layers))),
        ffn_hidden_size=draw(st.integers(0, 9)),
        moe_ffn_hidden_size=draw(st.integers(0, 9)),
        shared_expert_hidden_size=draw(st.integers(0, 3)),
        num_attention_heads=groups * draw(st.integers(1, 3)),
        kv_channels=draw(st.integers(1, 4)),
        num_query_groups=groups,
        vocab_size=draw(st.integers(0, 20)),
        num_positions=draw(st.integers(0, 20)),
        has_output_layer=draw(st.booleans()),
        is_gated=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        has_qkv_bias=draw(st.booleans()),
        has_norm_bias=draw(st.booleans()),
        has_qk_norm=draw(st.booleans()),
        latent_attention=draw(st.sampled_from([None, latent])),
        num_mtp_layers=draw(st.integers(0, 2)),
        has_router_bias=draw(st.booleans()),
        has_shared_expert_gate=draw(st.booleans()),
    )
