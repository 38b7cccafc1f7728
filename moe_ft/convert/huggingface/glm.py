"""GLM-4.5: query groups with biases and partly rotated heads; dense first layers, experts, further tokens.

Its router, shared experts and layers of further tokens are DeepSeek-V3's. GLM-5 has multi-latent attention:
deepseek.py.
"""

from collections.abc import Mapping
from typing import Any, override

from moe_ft.convert.huggingface import decoder, shared_experts
from moe_ft.convert.huggingface.mapping import Config, Settings, with_values
from moe_ft.errors import ConfigError

_ROTARY = "partial_rotary_factor"
_FEATURES = {
    **decoder.without(
        decoder.PLAIN,
        *("--add-qkv-bias", "--qk-layernorm", "--rotary-percent", "--mtp-num-layers"),
        *("--moe-router-enable-expert-bias", "--moe-router-score-function"),
        *("--moe-router-topk-scaling-factor", "--moe-router-num-groups"),
        "--moe-shared-expert-intermediate-size",
    ),
    "--mtp-use-repeated-layer": None,
}


class Glm4Moe(shared_experts.SharedExperts):
    """Biases of queries, keys and values, norms of each query and key, or neither."""

    architecture = "Glm4MoeForCausalLM"
    model_type = "glm4_moe"

    @override
    def config(self, settings: Settings) -> dict[str, Any]:
        decoder.check_decoder(settings, self.model_type, _FEATURES)
        return {
            **decoder.decoder_config(settings),
            **shared_experts.experts_config(settings, self.model_type),
            **shared_experts.sigmoid_config(settings, self.model_type),
            _ROTARY: settings["--rotary-percent"],
            "attention_bias": bool(settings.get("--add-qkv-bias")),
            "use_qk_norm": bool(settings.get("--qk-layernorm")),
        }

    @override
    def settings(self, config: Config) -> dict[str, Any]:
        plain = decoder.without(decoder.PLAIN_CONFIG, "attention_bias", _ROTARY)
        percent, config = rotary_factor(config, 0.5)
        return {
            **decoder.decoder_settings(config, self.model_type, plain),
            **shared_experts.experts_settings(config, self.model_type),
            **shared_experts.sigmoid_settings(config, self.model_type),
            "--rotary-percent": percent,
            "--add-qkv-bias": config.get("attention_bias", False),
            "--qk-layernorm": config.get("use_qk_norm", False),
        }

    @override
    def attention_options(self, settings: Settings) -> Mapping[str, Any]:
        has_norms = settings.get("--qk-layernorm")
        return {
            "has_bias": bool(settings.get("--add-qkv-bias")),
            "norms": (decoder.head_size(settings),) * 2 if has_norms else None,
        }


def rotary_factor(config: Config, default: float) -> tuple[float, Config]:
    """Return the part of a head that is rotated, and the configuration without it."""
    places = [config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}]
    given = [each[_ROTARY] for each in places if each.get(_ROTARY) is not None] or [default]
    wrong = [each for each in given if not isinstance(each, int | float) or not 0 < each <= 1]
    if wrong or len(set(given)) > 1:
        raise ConfigError(
            f"config.json has {_ROTARY}={', '.join(map(str, given))}, and it must be one number above 0 and "
            "at most 1. Compare it with the published file."
        )
    scalings = {
        key: {name: value for name, value in config[key].items() if name != _ROTARY}
        for key in ("rope_parameters", "rope_scaling")
        if config.get(key)
    }
    return float(given[0]), with_values(config, scalings)
