"""Jobs that train with NVIDIA's Megatron-Bridge: its loop, its configuration and its recipes.

    from megatron.fault_tolerance.bridge import protected

    with protected(["--moe-ft-strategy", "STRATEGY"]):
        pretrain(config, forward_step)

A script need not be changed: `python -m moe_ft run --moe-ft-strategy STRATEGY -- SCRIPT` does the same.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "protected":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # At its first use: the import of Bridge takes half a minute.
    return importlib.import_module("megatron.fault_tolerance.bridge.launch").protected
