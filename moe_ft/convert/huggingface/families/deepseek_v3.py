"""DeepSeek-V3: sigmoid scores, a bias for the choice of experts, and layers that predict further tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moe_ft.convert.huggingface.families import deepseek
from moe_ft.convert.huggingface.mapping import Config, Mapped, Settings, expect, expect_config

_ROUTER = {"--moe-router-score-function": "sigmoid", "--moe-router-enable-expert-bias": True}
_BEST = 2  # experts whose scores are the score of a group


@dataclass(frozen=True, slots=True)
class DeepseekV3:
    """The family of DeepSeek-V3."""

    architecture: str = "DeepseekV3ForCausalLM"
    model_type: str = "deepseek_v3"

    def check(self, settings: Settings) -> None:
        """Raise ConfigError that names the first feature which the family cannot express."""
        self.config(settings)

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return `config.json` without the type and the version."""
        expect(settings, self.model_type, _ROUTER)
        return {
            **deepseek.common_config(settings, self.model_type),
            **deepseek.groups_config(settings, self.model_type, best=_BEST),
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": settings["--moe-router-topk"]
            > 1,  # Megatron does not divide by one score
            "num_nextn_predict_layers": settings.get("--mtp-num-layers") or 0,
        }

    def settings(self, config: Config) -> dict[str, Any]:
        """Return Megatron's settings, those that are off included."""
        router = {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": config["num_experts_per_tok"] > 1,
        }
        expect_config(config, self.model_type, router)
        return {
            **deepseek.common_settings(config, self.model_type),
            **deepseek.groups_settings(config, self.model_type, best=_BEST),
            **_ROUTER,
            "--moe-router-pre-softmax": False,
            "--mtp-num-layers": config.get("num_nextn_predict_layers") or None,
        }

    def tensors(self, settings: Settings) -> Iterator[Mapped]:
        """Yield every tensor of the model, layer by layer."""
        return deepseek.model_tensors(settings, self.model_type)
