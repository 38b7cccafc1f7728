"""The pretraining program over the stand-in for NCCL, as a GPU machine would run it: a script of tests.

Its tensors are plain ones of the CPU, so what is late are collectives alone. The repair of a dead rank takes
its paths for GPUs.
"""

import runpy
from types import SimpleNamespace
from typing import Any

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.repair import rules, seam
from moe_ft.loop.leaving import BreakpointWriter
from tests.device.nccl import late_nccl


def _install() -> None:
    on_gpus: Any = SimpleNamespace(is_active=lambda: False)
    seam.cpu_device = rules.cpu_device = on_gpus  # type: ignore[attr-defined]
    use: Any = BreakpointWriter.use
    BreakpointWriter.use = lambda self, *args, **given: use(  # type: ignore[method-assign]
        self, *args, **{**given, "is_on_gpu": True}
    )
    # Their timeouts are NCCL's, which nobody waits for.
    cpu_device._with_group_timeout = lambda operation: operation  # type: ignore[assignment]


if __name__ == "__main__":
    _install()
    with late_nccl():
        runpy.run_path("pretrain_gpt_moe.py", run_name="__main__")
