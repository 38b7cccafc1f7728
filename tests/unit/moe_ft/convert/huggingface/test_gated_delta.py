"""The text part of Qwen3.5 has the same logits in Megatron as in transformers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.ssm.gated_delta_net import common
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, Qwen3_5MoeConfig

from moe_ft.convert.huggingface.gated_delta import Qwen35Moe
from moe_ft.convert.huggingface.mapping import flags_of
from moe_ft.convert.huggingface.release import open_release
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    SMALL,
    check_logits,
    converted,
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
    "deepstack_visual_indexes": [],
}
TEXT: dict[str, Any] = SMALL | {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def normalize_in_torch() -> None:
    """Take torch's norm of vectors for that of `fla`, whose kernel needs a GPU.

    It has the signature of the one in `fla.modules.l2norm`; all else of a delta net is Megatron's own.
    """

    def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return x * (x.square().sum(dim=-1, keepdim=True) + eps).rsqrt()

    common.HAVE_FLA = True
    common.l2norm = l2norm


# config.json of Qwen/Qwen3.5-35B-A3B, the text model.
PUBLISHED: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
}


@pytest.fixture
def qwen() -> Any:
    """Return a small Qwen3.5."""
    rope = {"rope_parameters": {**TEXT["rope_parameters"]}}  # transformers changes it
    config = Qwen3_5MoeConfig(
        text_config=TEXT | rope, vision_config=VISION, tie_word_embeddings=False
    )
    return random_model(config, AutoModelForImageTextToText)


def test_text_part_has_the_same_logits(qwen: Any, tmp_path: Path) -> None:
    checkpoint, _, _ = check_logits(
        qwen, tmp_path, "--deterministic-mode", prepare=normalize_in_torch
    )
    with pytest.raises(ConfigError, match="of a known family, and is of none"):
        converted(checkpoint, "hf")


def test_experts_may_be_stacked_as_in_published_files(qwen: Any, tmp_path: Path) -> None:
    saved, published = tmp_path / "saved", tmp_path / "published"
    qwen.save_pretrained(saved)
    shutil.copytree(saved, published)
    tensors = tensors_of(saved)
    for layer in range(2):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        parts = {
            name: [tensors.pop(f"{experts}.{expert}.{name}.weight") for expert in range(4)]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        gate, up, down = (torch.stack(each) for each in parts.values())
        tensors |= {f"{experts}.gate_up_proj": torch.cat((gate, up), dim=1)}
        tensors |= {f"{experts}.down_proj": down}
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    alone, stacked = open_release(saved), open_release(published)
    assert [each.name for each in alone.tensors()] == [each.name for each in stacked.tensors()]
    for each in alone.tensors():
        assert torch.equal(alone.read(each, "weight"), stacked.read(each, "weight")), each.name


def test_published_model_is_translated() -> None:
    settings = Qwen35Moe().settings(PUBLISHED)
    assert settings["--linear-attention-freq"] == [1, 1, 1, 0] * 10
    assert settings["--rotary-percent"] == 0.25
    flags = flags_of(settings)
    assert {"--apply-layernorm-1p", "--attention-output-gate"} < set(flags)
    few = {tensor.tensor: tensor for tensor in Qwen35Moe().tensors(settings | {"--num-experts": 1})}
    keys = few["decoder.layers.4.self_attention.in_proj.weight.key"]
    rows = torch.arange(8192 * 2048).view(8192, 2048)
    assert torch.equal(keys.join([rows]), rows[2048:4096])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_output_gate", False),
        ("layer_types", ["linear_attention"] * 39),
        ("layer_types", ["sliding_attention"] * 40),
        ("norm_topk_prob", False),
    ],
)
def test_other_models_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}="):
        Qwen35Moe().settings(PUBLISHED | {key: value})
