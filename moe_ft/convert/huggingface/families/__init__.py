"""The families, by `model_type`."""

from collections.abc import Mapping
from types import MappingProxyType

from moe_ft.convert.huggingface.mapping import Family

FAMILIES: Mapping[str, Family] = MappingProxyType({})
