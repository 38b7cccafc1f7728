"""Text parts of models that see pictures become models of Megatron with the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    SMALL,
    TOLERANCE,
    check_logits,
    converted,
    difference,
    loaded,
    random_model,
)

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": SMALL["hidden_size"],
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}
# Three positions of each token, as pictures have them.
ROPE = {"rope_type": "default", "rope_theta": 500, "mrope_section": [2, 2, 2]}
TEXT: dict[str, Any] = SMALL | {
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "rope_parameters": ROPE | {"mrope_interleaved": True},
    "tie_word_embeddings": False,
}


@pytest.fixture
def qwen() -> Any:
    """Return a small Qwen3-VL."""
    config = Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    return random_model(config, AutoModelForImageTextToText)


def test_text_part_of_qwen3_vl_has_the_same_logits_and_becomes_a_qwen3(
    qwen: Any, tmp_path: Path
) -> None:
    checkpoint, tokens, expected = check_logits(qwen, tmp_path)
    with torch.no_grad():
        back = loaded(converted(checkpoint, "hf")[0])
        assert back.config.model_type == "qwen3_moe"
        assert difference(back(tokens).logits, expected) < TOLERANCE


def test_command_says_that_pictures_are_left_out(qwen: Any, tmp_path: Path) -> None:
    qwen.save_pretrained(tmp_path / "saved")
    checkpoint, printed = converted(tmp_path / "saved", "torch_dist")
    assert "TEXT PART ONLY: " in printed
    assert (
        " of Qwen3VLMoeForConditionalGeneration are not converted, called model.visual.*" in printed
    )
    with pytest.raises(ConfigError, match="--family=qwen3_vl_moe must be one of .*qwen3_moe"):
        converted(checkpoint, "hf", family="qwen3_vl_moe")
