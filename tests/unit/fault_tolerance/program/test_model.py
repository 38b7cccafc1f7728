"""Ranks that hold the embedding, and layouts of MTP layers that are refused."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.gpt import GPTModelConfig

from megatron.fault_tolerance.program.model import check_mtp_place, embedding_ranks
from moe_ft.errors import ConfigError

PIPELINE = [1, 5, 9]


def config_of(layout: str | None, *, is_tied: bool, pp: int = 3) -> GPTModelConfig:
    num_mtp_layers = None if layout is None else layout.count("m") or None
    num_stages = 1 if layout is None else layout.count("|") + 1
    transformer = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=num_stages // pp if num_stages > pp else None,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=torch.float32,
        mtp_num_layers=num_mtp_layers,
    )
    return GPTModelConfig(
        transformer=transformer, vocab_size=8, share_embeddings_and_output_weights=is_tied
    )


@pytest.mark.parametrize(
    ("layout", "is_tied", "ranks"),
    [
        (None, False, [1]),
        (None, True, [1, 9]),
        ("Ett|tt|L", False, [1]),
        ("Ett|ttm|L", False, [1, 5]),
        ("Ett|ttm|L", True, [1, 5, 9]),
        ("Ett|tt|mL", False, [1, 9]),
        ("Et|t|t|t|m|L", True, [1, 5, 9]),
    ],
)
def test_ranks_of_the_embedding_are_those_with_mtp_layers_too(
    layout: str | None, is_tied: bool, ranks: list[int]
) -> None:
    assert embedding_ranks(config_of(layout, is_tied=is_tied), PIPELINE) == ranks


def test_one_stage_holds_the_embedding_alone() -> None:
    assert embedding_ranks(config_of(None, is_tied=True, pp=1), [3]) == [3]


def test_mtp_apart_from_the_embedding_on_the_first_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout=Ett\|t\|tm\|L puts MTP layers on the first"):
        check_mtp_place(config_of("Ett|t|tm|L", is_tied=False, pp=2))


@pytest.mark.parametrize(
    ("layout", "pp"), [(None, 1), ("Ettttm|L", 2), ("Ett|t|t|mL", 2), ("Et|t|t|t|m|L", 3)]
)
def test_other_places_of_mtp_layers_are_accepted(layout: str | None, pp: int) -> None:
    check_mtp_place(config_of(layout, is_tied=True, pp=pp))
