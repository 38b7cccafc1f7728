"""A model of transformers is trained in another layout, and becomes a model of transformers again.

That every family gives the same numbers is tests/unit/moe_ft/convert/huggingface/test_families.py.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import pretrain_gpt_moe
from moe_ft.convert.conversion import ConversionRequest, convert
from tests.demo_model import layout_flags
from tests.harness import run_ranks
from tests.megatron_logits import megatron_logits
from tests.stock import scalars_of
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    TOLERANCE,
    check_is_equal,
    converted,
    difference,
    loaded,
    random_model,
)

SEQUENCE, MICRO_BATCHES = 32, 4
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": SEQUENCE,
}
QWEN = SMALL | {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
DEEPSEEK: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000,
    "factor": 40.0,  # --rotary-scaling-factor
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.2,
}
MODELS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=20),
    "qwen3_moe": Qwen3MoeConfig(**QWEN),
    "olmoe": OlmoeConfig(**SMALL, num_experts=4),
    "minimax_m2": MiniMaxM2Config(**SMALL, num_local_experts=4, head_dim=8),
    "gpt_oss": GptOssConfig(**SMALL, num_local_experts=4, head_dim=8, sliding_window=8),
    "deepseek_v2": DeepseekV2Config(
        **DEEPSEEK | {"max_position_embeddings": 163840, "rope_parameters": YARN},
        q_lora_rank=None,
        topk_method="group_limited_greedy",
    ),
    "deepseek_v3": DeepseekV3Config(**DEEPSEEK, q_lora_rank=12, num_nextn_predict_layers=0),
    "glm4_moe": Glm4MoeConfig(
        **SMALL | {"n_routed_experts": 4, "moe_intermediate_size": 24},
        attention_bias=True,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    ),
}
# Flags that a job of gpt-oss runs with.
OF_GPT_OSS = [
    *("--softmax-type", "learnable", "--window-size", "7,0", "--window-attn-skip-freq", "2"),
    *("--quick-geglu", "--glu-linear-offset", "1.0", "--activation-func-clamp-value", "7.0"),
    *("--position-embedding-type", "yarn", "--yarn-original-max-position-embeddings", "4096"),
    *("--yarn-beta-fast", "32.0", "--yarn-beta-slow", "1.0"),
    "--no-yarn-correction-range-round-to-int",
]
QUICK = "mixtral"  # in `make test`, on two ranks
TRAINING = [
    *("--seq-length", str(SEQUENCE), "--micro-batch-size", "2", "--global-batch-size", "16"),
    *("--train-iters", "2", "--lr", "1e-3", "--lr-decay-style", "constant", "--eval-iters", "0"),
    *("--tokenizer-type", "NullTokenizer"),
    *("--moe-token-dispatcher-type", "alltoall", "--distributed-timeout-minutes", "1"),
    *("--moe-ft-strategy", "dense", "--moe-ft-interval", "1", "--moe-ft-persist-interval", "2"),
    *("--tensorboard-log-interval", "1", "--moe-ft-job-id", "job", "--save-interval", "2"),
]


def train_and_record(flags: list[str], folder: str) -> None:
    """Train on this rank, and write the first batches that it has read."""
    samples: list[dict[str, torch.Tensor]] = []
    program: Any = pretrain_gpt_moe
    forward_step = program.forward_step

    def recorded(data: Iterator[dict[str, torch.Tensor]] | None, *args: Any) -> Any:
        class Watched:
            def __next__(self) -> dict[str, torch.Tensor]:
                assert data is not None
                samples.append(next(data))
                return samples[-1]

        return forward_step(Watched(), *args)

    program.forward_step = recorded
    pretrain_gpt_moe.main(flags)
    rank = torch.distributed.get_rank()
    torch.save(samples[:MICRO_BATCHES], Path(folder) / f"samples_{rank}.pt")


def loss_of(model: PreTrainedModel, samples: list[dict[str, torch.Tensor]]) -> float:
    """Return the mean loss over all tokens that count."""
    total = count = torch.zeros(())
    for sample in samples:
        with torch.no_grad():
            logits = model(sample["tokens"]).logits
        labels, mask = sample["labels"].flatten(), sample["loss_mask"].flatten()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        total, count = total + (losses * mask).sum(), count + mask.sum()
    return float(total / count)


@pytest.fixture(
    params=[pytest.param(name, marks=() if name == QUICK else pytest.mark.rest) for name in MODELS]
)
def trained(
    request: pytest.FixtureRequest, tmp_path: Path, memory_dir: Path, dataset_flags: list[str]
) -> tuple[PreTrainedModel, str, Path]:
    """Return a model, the flags of Megatron for it, and the folder of a job that has started from it."""
    model = random_model(MODELS[request.param])
    model.save_pretrained(tmp_path / "saved")
    checkpoint, printed = converted(tmp_path / "saved", "torch_dist")
    flags = printed.splitlines()[-1]
    assert ({*OF_GPT_OSS} <= {*flags.split()}) is (request.param == "gpt_oss")
    places = [
        *("--load", str(checkpoint), "--save", str(tmp_path / "stock")),
        *(
            "--moe-ft-persist-dir",
            str(tmp_path / "storage"),
            "--moe-ft-memory-dir",
            str(memory_dir),
        ),
        *("--tensorboard-dir", str(tmp_path / "board")),
    ]
    layout = {"ep": 2} if request.param == QUICK else {"pp": 2, "ep": 2}
    words = [*flags.split(), *TRAINING, *places, *dataset_flags, *layout_flags(layout)]
    num_ranks = prod(layout.values())
    job = run_ranks(train_and_record, num_ranks, words, str(tmp_path), log_dir=tmp_path / "job")
    assert "no test of moe_ft runs with" not in job.check().output(0)
    return model, flags, tmp_path


def test_job_starts_from_a_model_and_its_checkpoints_become_one(
    trained: tuple[PreTrainedModel, str, Path],
) -> None:
    model, flags, folder = trained
    samples = [each for rank in (0, 1) for each in torch.load(folder / f"samples_{rank}.pt")]
    (first, loss), _ = scalars_of(folder / "board")["lm loss"]
    assert (first, len(samples)) == (1, 2 * MICRO_BATCHES)
    assert loss == pytest.approx(loss_of(model, samples), rel=TOLERANCE)

    ours, _ = converted(folder / "storage", "hf")
    theirs, _ = converted(folder / "stock", "hf")
    check_is_equal(ours, theirs)
    facts = json.loads((ours / "model.safetensors.index.json").read_text())["metadata"]["moe_ft"]
    assert facts["unit_iterations"]["layer.3.expert.2"] == facts["iteration"] == 2

    weights = folder / "weights"
    convert(
        ConversionRequest(
            source=str(folder / "storage"),
            destination=str(weights),
            to="torch_dist",
            what="weights",
        )
    )
    tokens = samples[0]["tokens"]
    logits = megatron_logits(flags.split(), weights, tokens, folder / "logits")
    with torch.no_grad():
        assert difference(logits, loaded(ours)(tokens).logits) < TOLERANCE
        assert difference(logits, model(tokens).logits) > TOLERANCE  # it has learned
