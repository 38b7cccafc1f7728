"""gpt-oss and MiniMax-M2: the same logits in Megatron and back, and what Megatron cannot express."""

from pathlib import Path
from typing import Any

from transformers import GptOssConfig, MiniMaxM2Config

from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL, check_round_trip, tensors_of

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500,
    "factor": 8.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
# Activations reach the limit; a window of 8 of 24 tokens.
GPT_OSS: dict[str, Any] = SMALL | {
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "sliding_window": 8,
    "swiglu_limit": 0.7,
    "rope_parameters": YARN,
}
MINIMAX: dict[str, Any] = SMALL | {
    "num_local_experts": 4,
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5},
}


def test_gpt_oss_has_the_same_logits_and_comes_back(tmp_path: Path) -> None:
    back = check_round_trip(GptOssConfig(**GPT_OSS), tmp_path)
    assert tensors_of(back)["model.layers.2.mlp.experts.gate_up_proj_bias"].shape == (4, 80)


def test_minimax_has_the_same_logits_and_comes_back(tmp_path: Path) -> None:
    back = check_round_trip(MiniMaxM2Config(**MINIMAX), tmp_path)
    assert "model.layers.1.block_sparse_moe.e_score_correction_bias" in tensors_of(back)
