"""Models for tests of the papers' arithmetic."""

from hypothesis import strategies as st

from benchmarks.papers.models import ModelShape, evenly_spaced_layers

# 2 MoE layers of 4 experts with 10 parameters each (width 1, no biases).
TINY = ModelShape(
    num_layers=2,
    hidden_size=1,
    num_experts=4,
    moe_layers=(0, 1),
    ffn_hidden_size=5,
    has_bias=False,
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
