"""The pretraining program over the stand-in for NCCL, with its paths for GPUs: also a script of tests.

Its tensors are plain ones of the CPU, so only collectives are late.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pretrain_gpt_moe
from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.repair import rules, seam
from moe_ft.loop.leaving import BreakpointWriter
from tests.device.nccl import late_nccl


def train_on_nccl(flags: list[str]) -> None:
    """Train in this process, which ends with it."""
    on_gpus: Any = SimpleNamespace(is_active=lambda: False)
    seam.cpu_device = rules.cpu_device = on_gpus  # type: ignore[attr-defined]
    use: Any = BreakpointWriter.use
    BreakpointWriter.use = lambda self, *args, **given: use(  # type: ignore[method-assign]
        self, *args, **{**given, "is_on_gpu": True}
    )
    # Its operations have the timeouts of NCCL, for which nobody waits.
    cpu_device._with_group_timeout = lambda operation: operation
    with late_nccl():
        pretrain_gpt_moe.main(flags)


if __name__ == "__main__":
    train_on_nccl(sys.argv[1:])
