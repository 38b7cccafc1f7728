"""Multi-latent attention: the tensors and settings that DeepSeek-V2 and V3 have in common.

Queries need not be compressed (`q_lora_rank`): then one projection makes them, as in V2-Lite. mla_rope.py
has the rotary part.
"""

from collections.abc import Iterator
from typing import Any

from moe_ft.convert.huggingface.mapping import (
    Config,
    Mapped,
    Settings,
    expect,
    expect_config,
    same,
)
from moe_ft.errors import ConfigError

# transformers takes this for the norms of compressed queries, keys and values, whatever rms_norm_eps is.
_EPSILON = 1e-6
# The layers that stock Megatron needs for what it would compute otherwise.
SPEC = ["megatron.fault_tolerance.program.deepseek_layers", "layer_spec"]
_SIZES = {
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_nope_head_dim": "--qk-head-dim",
    "qk_rope_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
}


def attention_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json`.

    Raises:
        ConfigError: if the family has no such attention.
    """
    expect(
        settings,
        family,
        {
            "--multi-latent-attention": True,
            "--qk-layernorm": True,
            "--experimental-attention-variant": None,
        },
    )
    if settings["--layernorm-epsilon"] != _EPSILON:
        raise ConfigError(
            f"--norm-epsilon={settings['--layernorm-epsilon']} must be {_EPSILON} for a model of {family}: "
            "transformers has this number for the norms of compressed queries, keys and values. Convert "
            "to torch_dist or safetensors."
        )
    if not settings.get("--q-lora-rank") and not _leaves_queries_alone(settings):
        raise ConfigError(
            f"--q-lora-rank={settings.get('--q-lora-rank')} must be a number with --transformer-impl="
            f"{settings.get('--transformer-impl')}, --spec={settings.get('--spec')}, --mtp-num-layers="
            f"{settings.get('--mtp-num-layers')} and --mla-down-proj-fusion="
            f"{bool(settings.get('--mla-down-proj-fusion'))}: Megatron 0.19.2 then normalizes the input of "
            f"the queries a second time, and a model of {family} does not. Convert to torch_dist or "
            "safetensors."
        )
    sizes = {key: settings.get(flag) or None for key, flag in _SIZES.items()}
    heads = settings["--num-attention-heads"]
    return {
        "num_key_value_heads": heads,
        **sizes,
        "attention_bias": False,
        "rms_norm_eps": _EPSILON,
    }


def attention_settings(config: Config, family: str) -> dict[str, Any]:
    """Return Megatron's settings.

    Raises:
        ConfigError: if Megatron has no such attention.
    """
    heads = config["num_attention_heads"]
    expect_config(
        config,
        family,
        {
            "num_key_value_heads": (heads, None),
            "rms_norm_eps": _EPSILON,
            "rope_interleave": True,
        },
    )
    # --spec does not reach layers of multi-token prediction.
    has_further = bool(config.get("num_nextn_predict_layers"))
    queries = {"--transformer-impl": "local"} if has_further else {"--spec": SPEC}
    return {
        "--multi-latent-attention": True,
        "--num-attention-heads": heads,
        "--group-query-attention": False,
        "--qk-layernorm": True,
        "--layernorm-epsilon": _EPSILON,
        **{flag: config[key] for key, flag in _SIZES.items()},
        **({} if config["q_lora_rank"] else queries),
    }


def _leaves_queries_alone(settings: Settings) -> bool:
    if settings.get("--transformer-impl") == "local":
        return True
    others = settings.get("--mtp-num-layers") or settings.get("--mla-down-proj-fusion")
    return settings.get("--spec") == SPEC and not others


def attention(settings: Settings, megatron: str, hub: str) -> Iterator[Mapped]:
    """Yield the tensors of a layer's attention.

    Args:
        megatron: the attention's name in Megatron.
        hub: its name on the hub.
    """
    hidden, heads = settings["--hidden-size"], settings["--num-attention-heads"]
    queries, latent = settings.get("--q-lora-rank"), settings["--kv-lora-rank"]
    plain, rotary = settings["--qk-head-dim"], settings["--qk-pos-emb-head-dim"]
    values = settings["--v-head-dim"]

    def weight(ours: str, theirs: str, *shape: int) -> Mapped:
        return same(f"{megatron}.{ours}.weight", f"{hub}.{theirs}.weight", shape)

    def norm(ours: str, fused: str, theirs: str, size: int) -> Mapped:
        others = (f"{megatron}.{fused}.layer_norm_weight",)  # with Transformer Engine
        return same(f"{megatron}.{ours}.weight", f"{hub}.{theirs}.weight", (size,), others=others)

    query_rows = heads * (plain + rotary)
    if queries:
        yield weight("linear_q_down_proj", "q_a_proj", queries, hidden)
        yield norm("q_layernorm", "linear_q_up_proj", "q_a_layernorm", queries)
        yield weight("linear_q_up_proj", "q_b_proj", query_rows, queries)
    else:
        yield weight("linear_q_proj", "q_proj", query_rows, hidden)
    yield weight("linear_kv_down_proj", "kv_a_proj_with_mqa", latent + rotary, hidden)
    yield norm("kv_layernorm", "linear_kv_up_proj", "kv_a_layernorm", latent)
    yield weight("linear_kv_up_proj", "kv_b_proj", heads * (plain + values), latent)
    yield weight("linear_proj", "o_proj", hidden, heads * values)
