"""Megatron flags of the small MoE GPT that most tests train."""

from collections.abc import Mapping
from pathlib import Path

_MODEL: dict[str, str | int | float | None] = {
    "--num-layers": 4,
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--ffn-hidden-size": 64,
    "--moe-ffn-hidden-size": 64,
    "--num-experts": 4,
    "--moe-router-topk": 2,
    "--moe-token-dispatcher-type": "alltoall",
    "--moe-router-load-balancing-type": "aux_loss",
    "--moe-aux-loss-coeff": 0.01,
    "--seq-length": 32,
    "--max-position-embeddings": 32,
    "--position-embedding-type": "rope",
    "--disable-bias-linear": None,
    "--swiglu": None,
    "--untie-embeddings-and-output-weights": None,
    "--hidden-dropout": 0.0,
    "--attention-dropout": 0.0,
    "--micro-batch-size": 2,
    "--global-batch-size": 16,
    "--train-iters": 4,
    "--lr": 1e-3,
    "--lr-decay-style": "constant",
    "--clip-grad": 1.0,
    "--bf16": None,
    "--use-distributed-optimizer": None,
    "--log-interval": 1,
    "--eval-interval": 1000,
    "--eval-iters": 0,
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": 256,
    "--make-vocab-size-divisible-by": 64,
    "--distributed-timeout-minutes": 5,
    "--seed": 1234,
    "--num-workers": 0,  # they cost cores; tests of repairs and restarts have some
}

# Inject a failed check of the gradients into every iteration but the first: Megatron runs those twice.
RERUNS = (
    *("--no-check-for-nan-in-loss-and-grad", "--check-for-large-grads"),
    *("--error-injection-rate", "1", "--error-injection-type", "transient_error"),
)


# As in DeepSeek-V3: multi-latent attention, shared experts, a bias per expert, groups of experts, a dense
# first layer, and a layer that predicts a second token.
DEEPSEEK: dict[str, str | int | float | bool] = {
    "num_layers": 2,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "moe_layer_freq": "([0]*1+[1]*1)",
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "mtp_num_layers": 1,
}
# As in DeepSeek-V3.2, with fewer keys for each query than there are tokens, and an indexer that is trained.
INDEXER: dict[str, str | bool] = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": "2",
    "dsa_indexer_head_dim": "16",
    "dsa_indexer_topk": "8",
    "dsa_indexer_k_norm_epsilon": "1e-6",
    "no_dsa_indexer_rotate_activation": True,
    "dsa_indexer_loss_coeff": "0.1",
}


NO_EXPERTS: dict[str, bool] = {
    name: False
    for name in (
        *("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_aux_loss_coeff"),
        *("moe_token_dispatcher_type", "moe_router_load_balancing_type"),
    )
}


def deepseek_flags(**changes: str | int | float | bool) -> list[str]:
    """Return the flags of a small model like DeepSeek, with changes as in `model_flags`."""
    return model_flags(**{**DEEPSEEK, **changes})


def model_flags(**changes: str | int | float | bool | tuple[str, ...] | None) -> list[str]:
    """Return the flags of the small model.

    Args:
        changes: flags with underscores for dashes: a value, True for a flag without one, or False
            to leave a flag out (``bf16=False, train_iters=8``).
    """
    flags: dict[str, str | int | float | tuple[str, ...] | None] = dict(_MODEL)
    for name, value in changes.items():
        flag = "--" + name.replace("_", "-")
        if value is False:
            flags.pop(flag, None)
        else:
            flags[flag] = None if value is True else value
    return [word for flag, value in flags.items() for word in _words(flag, value)]


def layout_flags(layout: Mapping[str, int]) -> list[str]:
    """Return the flags of a layout such as ``{"pp": 2, "ep": 2}``."""
    names = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "ep": "--expert-model-parallel-size",
        "etp": "--expert-tensor-parallel-size",
        "cp": "--context-parallel-size",
    }
    return [word for name, size in layout.items() for word in (names[name], str(size))]


def world_size_of(layout: Mapping[str, int]) -> int:
    """Return the ranks of a layout with pipeline stages: those of experts are also the data-parallel ones."""
    return layout["pp"] * max(layout.get("ep", 1), layout.get("tp", 1) * layout.get("dp", 1))


def event_flags(directory: Path) -> list[str]:
    """Return the flags that write events and a final digest."""
    return ["--moe-ft-event-log", str(directory), "--moe-ft-state-digest"]


def _words(flag: str, value: str | float | tuple[str, ...] | None) -> list[str]:
    # Blanks separate several values of one flag; a tuple holds a value with blanks.
    if isinstance(value, tuple):
        return [flag, *value]
    return [flag] if value is None else [flag, *str(value).split()]
