"""The part of fault tolerance that touches Megatron's training loop: flags, seams, data, CPU device.

A pretraining script imports `pretrain` and `add_arguments` from here, a training loop of another kind
`Checkpointer`. Each is imported at its first use: importing the package imports neither torch nor Megatron.
"""

import importlib
from typing import Any

from megatron.fault_tolerance.seams.versions import check_oldest

_EXPORTS = {
    "pretrain": "megatron.fault_tolerance.launch.pretraining",
    "add_arguments": "megatron.fault_tolerance.launch.arguments",
    "Checkpointer": "megatron.fault_tolerance.checkpointer",
    "RunFacts": "megatron.fault_tolerance.checkpointer",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_oldest()
    return getattr(importlib.import_module(_EXPORTS[name]), name)
