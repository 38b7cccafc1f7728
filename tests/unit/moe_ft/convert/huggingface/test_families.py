"""Models of transformers give the same logits in Megatron, and come back bit for bit.

Families with multi-latent attention have tests of their own.
"""

from pathlib import Path

import pytest
import torch
from transformers import (
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.unit.moe_ft.convert.huggingface.round_trip import (
    SMALL,
    check_is_equal,
    check_round_trip,
    converted,
    random_model,
    tensors_of,
)

QWEN = SMALL | {"num_experts": 4, "moe_intermediate_size": 24}
QWEN2 = QWEN | {"shared_expert_intermediate_size": 20}
OLMOE = {key: value for key, value in SMALL.items() if key != "head_dim"}
MIXTRAL = MixtralConfig(**SMALL, num_local_experts=4)
CASES: dict[str, PreTrainedConfig] = {
    "mixtral": MIXTRAL,
    "qwen2_moe": Qwen2MoeConfig(**QWEN2, mlp_only_layers=[0]),
    "olmoe": OlmoeConfig(**OLMOE, num_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**QWEN, norm_topk_prob=True, decoder_sparse_step=2),
}
OTHERS: dict[str, PreTrainedConfig] = {
    "mixtral, tied": MixtralConfig(**SMALL, num_local_experts=3, tie_word_embeddings=True),
    "qwen2_moe without biases": Qwen2MoeConfig(**QWEN2, qkv_bias=False, norm_topk_prob=True),
    "qwen3_moe without groups": Qwen3MoeConfig(**(QWEN | {"num_key_value_heads": 4})),
}
NAMES = {
    "mixtral": "block_sparse_moe.experts.3.w1.weight",
    "olmoe": "mlp.experts.3.gate_proj.weight",
    "qwen2_moe": "mlp.shared_expert_gate.weight",
    "qwen3_moe": "self_attn.q_norm.weight",
}


@pytest.mark.parametrize("name", CASES)
def test_megatron_gives_the_same_logits_and_the_model_comes_back(name: str, tmp_path: Path) -> None:
    back = check_round_trip(CASES[name], tmp_path)
    assert f"model.layers.1.{NAMES[name]}" in tensors_of(back)
    assert len(list(back.glob("*.safetensors"))) > 1


@pytest.mark.rest
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_of_the_families(name: str, tmp_path: Path) -> None:
    check_round_trip(OTHERS[name], tmp_path)


def test_numbers_of_two_bytes_come_back(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    random_model(MIXTRAL).to(torch.bfloat16).save_pretrained(saved)
    checkpoint, _ = converted(saved, "torch_dist")
    back, _ = converted(checkpoint, "hf")
    assert {each.dtype for each in tensors_of(back).values()} == {torch.bfloat16}
    check_is_equal(back, saved)
