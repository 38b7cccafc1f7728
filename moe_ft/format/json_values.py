"""Conversion of values to JSON, which has no NaN, no infinity and no tuples."""

import math
from collections.abc import Callable, Mapping
from typing import Any


def finite_or_name(value: Any) -> Any:
    """Return a value, but "nan", "inf" or "-inf" for a float that is not finite."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def convert_leaves(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return nested mappings and sequences as dicts and lists, with each leaf converted."""
    if isinstance(value, Mapping):
        return {str(key): convert_leaves(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_leaves(item, convert) for item in value]
    return convert(value)
