"""Ranks of a context share its sequence evenly; layouts with wrong gradients are refused.

The attention itself is compared with its definition in tests/distributed/test_local_attention.py.
"""

from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fault_tolerance.program.local_attention import check_latent_attention, chunks_of
from moe_ft.errors import ConfigError


@given(st.integers(1, 16))
def test_every_chunk_belongs_to_one_rank_and_all_have_equally_much_to_compute(size: int) -> None:
    shares = [chunks_of(rank, size) for rank in range(size)]
    assert sorted(chunk for share in shares for chunk in share) == list(range(2 * size))
    assert {sum(share) for share in shares} == {2 * size - 1}  # a chunk sees the chunks before it


def args_of(**changes: object) -> Namespace:
    given: dict[str, object] = {
        "tensor_model_parallel_size": 2,
        "multi_latent_attention": True,
        "transformer_impl": "local",
        "sequence_parallel": False,
    }
    return Namespace(**{**given, **changes})


def test_latent_attention_that_megatron_trains_wrongly_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--tensor-model-parallel-size=2 needs --sequence-parallel"
    ):
        check_latent_attention(args_of())


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_parallel": True},
        {"tensor_model_parallel_size": 1},
        {"transformer_impl": "transformer_engine"},
        {"multi_latent_attention": False},
    ],
)
def test_latent_attention_that_megatron_trains_rightly_is_accepted(
    changes: dict[str, object],
) -> None:
    check_latent_attention(args_of(**changes))
