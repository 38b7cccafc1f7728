"""A run of a model of DeepSeek's kind becomes one of transformers, directly or from Megatron's checkpoint."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_ft.convert.conversion import ConversionRequest, convert
from moe_ft.convert.huggingface.shared_experts import SPEC
from tests.demo_model import DEEPSEEK, INDEXER, deepseek_flags
from tests.jobs import CheckpointJob
from tests.megatron_logits import megatron_logits
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    NUM_TOKENS,
    TOLERANCE,
    check_is_equal,
    difference,
    tensors_of,
)

VOCABULARY = 256
V2: dict[str, str | bool] = {
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "mtp_num_layers": False,
    "q_lora_rank": False,
    "spec": " ".join(SPEC),  # also for groups: Megatron's have the score of two experts here
}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, str | bool]]] = {
    "tensors": ({"tp": 2, "etp": 1}, {"sequence_parallel": True}),
    "experts, layers of ours": ({"ep": 2}, V2),
    "stages, queries not compressed": ({"pp": 2}, {"q_lora_rank": False}),
    "stages, sparse attention": ({"pp": 2}, INDEXER),
}


def converted(source: Path, folder: Path, to: str) -> Path:
    convert(
        ConversionRequest(
            source=str(source), destination=str(folder), to=to, what="weights", dtype="fp32"
        )
    )
    return folder


@pytest.mark.rest
@pytest.mark.parametrize("name", LAYOUTS)
def test_run_becomes_a_model_of_transformers(name: str, job: CheckpointJob, tmp_path: Path) -> None:
    layout, changes = LAYOUTS[name]
    model = {"norm_epsilon": 1e-6, "rope_type": "rope", "max_position_embeddings": 64, **changes}
    job.set_model(2, layout, **{**DEEPSEEK, "train_iters": 3, "hidden_dropout": 0.0, **model})
    job.run("--moe-ft-persist-interval", "1", storage=True).check()
    direct = converted(job.storage, tmp_path / "direct", "hf")
    checkpoint = converted(job.storage, tmp_path / "checkpoint", "torch_dist")
    check_is_equal(converted(checkpoint, tmp_path / "model", "hf"), direct)
    loaded, info = AutoModelForCausalLM.from_pretrained(direct, output_loading_info=True)
    assert not info["missing_keys"]
    further = {each.split(".")[2] for each in info["unexpected_keys"]}
    biases = [each for key, each in tensors_of(direct).items() if key.endswith("_bias")]
    assert (further, len(biases)) == ((set(), 0) if changes is V2 else ({"2"}, 2))
    assert all(each.all() for each in biases)  # an odd number of steps of the same size
    tokens = torch.arange(2 * NUM_TOKENS).view(2, -1) * 7 % VOCABULARY
    with torch.no_grad():
        expected = loaded.eval()(tokens).logits
    flags = deepseek_flags(bf16=False, **{**model, "sequence_parallel": False})
    logits = megatron_logits(flags, checkpoint, tokens, tmp_path / "run")
    assert difference(logits[..., : expected.shape[-1]], expected) < TOLERANCE
