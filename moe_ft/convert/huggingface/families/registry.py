"""The families of models that can be converted, by `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from moe_ft.convert.huggingface.families.deepseek_v2 import DeepseekV2
from moe_ft.convert.huggingface.families.deepseek_v3 import DeepseekV3
from moe_ft.convert.huggingface.families.mixtral import Mixtral
from moe_ft.convert.huggingface.families.olmoe import Olmoe
from moe_ft.convert.huggingface.families.qwen_moe import QwenMoe
from moe_ft.convert.huggingface.mapping import Family

_FAMILIES: tuple[Family, ...] = (
    Mixtral(),
    QwenMoe("Qwen2MoeForCausalLM", "qwen2_moe", True),
    QwenMoe("Qwen3MoeForCausalLM", "qwen3_moe", False),
    DeepseekV2(),
    DeepseekV3(),
    Olmoe(),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({each.model_type: each for each in _FAMILIES})
