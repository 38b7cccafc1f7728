"""Rotary embedding of multi-latent attention: `config.json` and Megatron's settings, plain and YaRN.

Both sides rotate pairs of neighbouring elements, so weights are the same. They differ in how `mscale` and
`mscale_all_dim` become two numbers: a factor of sine and cosine, and one of the softmax. Only settings that
give the same numbers are translated.
"""

from collections.abc import Mapping
from math import log
from typing import Any

from moe_ft.convert.huggingface.mapping import Config, Settings, expect, expect_config
from moe_ft.errors import ConfigError

# Megatron 0.19.2 has no flags for these with multi-latent attention.
_FIXED = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_THETA = 10000
_PLAIN = "default"


def rope_config(settings: Settings, family: str) -> dict[str, Any]:
    """Return the keys of `config.json`, as DeepSeek writes them.

    Raises:
        ConfigError: if the family would compute other numbers.
    """
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
    """Return Megatron's settings.

    Raises:
        ConfigError: if Megatron would compute other numbers.
    """
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
