"""Multi-latent attention: the tensors, settings and rotary embedding that DeepSeek-V2 and V3 have in common.

Queries need not be compressed (`q_lora_rank`): then one projection makes them, as in V2-Lite. Both sides
rotate pairs of neighbouring elements, so weights are the same. They differ in how `mscale` and
`mscale_all_dim` become two numbers: a factor of sine and cosine, and one of the softmax. Only settings that
give the same numbers are translated.
"""

from collections.abc import Iterator, Mapping
from math import log
from typing import Any

from moe_ft.convert.huggingface.mapping import Config, Mapped, Settings, expect, expect_config, same
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
# Megatron 0.19.2 has no flags for these with multi-latent attention.
_FIXED = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_THETA = 10000
_PLAIN = "default"


def attention_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json`."""
    features = {"--multi-latent-attention": True, "--qk-layernorm": True}
    expect(settings, family, {**features, "--experimental-attention-variant": None})
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
    return {
        "num_key_value_heads": settings["--num-attention-heads"],
        **{key: settings.get(flag) or None for key, flag in _SIZES.items()},
        "attention_bias": False,
        "rms_norm_eps": _EPSILON,
    }


def attention_settings(config: Config, family: str) -> dict[str, Any]:
    """Return Megatron's settings."""
    heads = config["num_attention_heads"]
    expected = {"num_key_value_heads": (heads, None), "rms_norm_eps": _EPSILON}
    expect_config(config, family, {**expected, "rope_interleave": True})
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
    """Yield the tensors of a layer's attention; `megatron` and `hub` are its names there."""
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


def rope_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json`, as DeepSeek writes them."""
    expect(settings, family, {"--rope-type": (None, "rope", "yarn")})
    rope: dict[str, Any] = {}
    if settings.get("--rope-type") != "rope":  # Megatron's default is YaRN
        rope = {
            "type": "yarn",
            "factor": settings["--rotary-scaling-factor"],
            **_FIXED,
            "mscale": settings["--mscale"],
            "mscale_all_dim": settings["--mscale-all-dim"],
        }
    if _factors_of_transformers(rope) != _factors_of_megatron(settings):
        raise ConfigError(
            f"--mscale={settings['--mscale']} and --mscale-all-dim={settings['--mscale-all-dim']} must "
            "both be given with --rope-type=yarn, or left at 1 and 0, and --mscale-all-dim must be 0 with "
            f"--rope-type=rope: else a model of {family} computes another softmax. Convert to torch_dist "
            "or safetensors."
        )
    return {"rope_theta": settings["--rotary-base"], "rope_scaling": rope or None}


def rope_settings(config: Config, family: str) -> dict[str, Any]:
    """Return Megatron's settings."""
    rope = config.get("rope_parameters") or {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config.get("rope_theta", _THETA),
    }
    kind = rope.get("rope_type", rope.get("type", _PLAIN))
    is_yarn = kind == "yarn"
    theta = rope.get("rope_theta", _THETA)
    length = config["max_position_embeddings"]
    given = {"original_max_position_embeddings": length, **rope, "rope_type": kind}
    fixed = {"partial_rotary_factor": (1.0, None), "truncate": True}
    expect_config(
        given, family, {"rope_type": (_PLAIN, "yarn"), **fixed, **(_FIXED if is_yarn else {})}
    )
    expect_config(rope, family, {"rope_theta": int(theta)})  # --rotary-base is a whole number
    has_both = is_yarn and rope.get("mscale") and rope.get("mscale_all_dim")
    settings = {
        "--position-embedding-type": "rope",
        "--max-position-embeddings": length,
        "--rope-type": "yarn" if is_yarn else "rope",
        "--rotary-base": int(theta),
        "--rotary-percent": 1.0,
        "--rotary-interleaved": False,
        "--rotary-scaling-factor": rope["factor"] if is_yarn else 1.0,
        "--mscale": rope["mscale"] if has_both else 1.0,
        "--mscale-all-dim": (is_yarn and rope.get("mscale_all_dim")) or 0.0,
    }
    if _factors_of_transformers(rope if is_yarn else {}) != _factors_of_megatron(settings):
        keys = ("mscale", "mscale_all_dim", "attention_factor")
        raise ConfigError(
            f"config.json has {', '.join(f'{key}={rope.get(key)}' for key in keys)}, and with "
            "multi-latent attention Megatron cannot express these: either mscale and mscale_all_dim, or "
            "none of them. There is no conversion of this model."
        )
    return settings


def _growth(factor: float, mscale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def _factors_of_megatron(settings: Settings) -> tuple[float, float]:
    """Return the factor of sine and cosine, and that of the softmax."""
    factor, of_all = settings["--rotary-scaling-factor"], settings["--mscale-all-dim"]
    of_softmax = _growth(factor, of_all)  # also without YaRN
    of_rotation = _growth(factor, settings["--mscale"]) / of_softmax
    return (1.0 if settings.get("--rope-type") == "rope" else of_rotation), of_softmax


def _factors_of_transformers(rope: Mapping[str, Any]) -> tuple[float, float]:
    if not rope:
        return 1.0, 1.0
    factor, mscale, of_all = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim")
    of_rotation = rope.get("attention_factor")
    if of_rotation is None:
        has_both = mscale and of_all
        of_rotation = (
            _growth(factor, mscale) / _growth(factor, of_all) if has_both else _growth(factor, 1.0)
        )
    return of_rotation, _growth(factor, of_all) if of_all else 1.0
