"""Text parts of models that see pictures become models of Megatron with the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, Qwen3VLMoeConfig

from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    SMALL,
    TOLERANCE,
    check_is_equal,
    check_logits,
    converted,
    difference,
    loaded,
    random_model,
    tensors_of,
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


def test_text_part_of_qwen3_vl_has_the_same_logits_and_becomes_a_qwen3(tmp_path: Path) -> None:
    config = Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    qwen = random_model(config, AutoModelForImageTextToText)
    checkpoint, tokens, expected = check_logits(qwen, tmp_path)
    with torch.no_grad():
        back = loaded(converted(checkpoint, "hf")[0])
        assert back.config.model_type == "qwen3_moe"
        assert difference(back(tokens).logits, expected) < TOLERANCE
    with pytest.raises(ConfigError, match="--family=qwen3_vl_moe must be one of .*qwen3_moe"):
        converted(checkpoint, "hf", family="qwen3_vl_moe")


def test_experts_as_published_are_turned_and_pictures_are_left_out_loudly(tmp_path: Path) -> None:
    config = Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
    random_model(config, AutoModelForImageTextToText).save_pretrained(tmp_path / "saved")
    checkpoint, printed = converted(tmp_path / "saved", "torch_dist")
    assert "TEXT PART ONLY: " in printed
    wanted = " of Qwen3VLMoeForConditionalGeneration are not converted, called model.visual.*: no "
    assert wanted in printed
    tensors = tensors_of(tmp_path / "saved")
    turned = {
        name: each.mT.contiguous() if ".experts." in name else each
        for name, each in tensors.items()
    }
    path = tmp_path / "published"
    path.mkdir()
    (path / "config.json").write_bytes((tmp_path / "saved" / "config.json").read_bytes())
    save_file(turned, path / "model.safetensors")
    published, _ = converted(path, "torch_dist")
    check_is_equal(converted(published, "hf")[0], converted(checkpoint, "hf")[0])
