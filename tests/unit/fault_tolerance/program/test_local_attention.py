"""Layouts with wrong gradients are refused.

The attention itself is compared with its definition in tests/distributed/test_local_attention.py.
"""

from argparse import Namespace

import pytest

from megatron.fault_tolerance.program.local_attention import check_latent_attention
from moe_ft.errors import ConfigError


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
