"""DeepSeek-V2: softmax over all experts before the best are chosen."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moe_ft.convert.huggingface.families import deepseek
from moe_ft.convert.huggingface.mapping import Config, Mapped, Settings, expect, expect_config

_ROUTER = {
    "--moe-router-score-function": "softmax",
    "--moe-router-pre-softmax": True,
    "--moe-router-enable-expert-bias": False,
    "--mtp-num-layers": None,
}
_BEST = 1  # experts whose scores are the score of a group


@dataclass(frozen=True, slots=True)
class DeepseekV2:
    """The family of DeepSeek-V2."""

    architecture: str = "DeepseekV2ForCausalLM"
    model_type: str = "deepseek_v2"

    def check(self, settings: Settings) -> None:
        """Raise ConfigError that names the first feature which the family cannot express."""
        self.config(settings)

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return `config.json` without the type and the version."""
        expect(settings, self.model_type, _ROUTER)
        groups = deepseek.groups_config(settings, self.model_type, best=_BEST)
        is_limited = groups["topk_group"] < groups["n_group"]
        return {
            **deepseek.common_config(settings, self.model_type),
            **groups,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy" if is_limited else "greedy",
            "norm_topk_prob": False,
        }

    def settings(self, config: Config) -> dict[str, Any]:
        """Return Megatron's settings, those that are off included."""
        methods = ("greedy", "group_limited_greedy")
        router = {"scoring_func": "softmax", "topk_method": methods, "norm_topk_prob": False}
        expect_config(config, self.model_type, router)
        groups = (
            config
            if config.get("topk_method") == methods[1]
            else {**config, "n_group": 1, "topk_group": 1}
        )
        return {
            **deepseek.common_settings(config, self.model_type),
            **deepseek.groups_settings(groups, self.model_type, best=_BEST),
            **_ROUTER,
        }

    def tensors(self, settings: Settings) -> Iterator[Mapped]:
        """Yield every tensor of the model, layer by layer."""
        return deepseek.model_tensors(settings, self.model_type)
