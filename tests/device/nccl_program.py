"""The pretraining program as it is on a GPU: its defaults there, and over the stand-in for NCCL its paths.

Its tensors are plain ones of the CPU, so only collectives are late. Also a script of tests.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

import pretrain_gpt_moe
from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.repair import rules, seam
from megatron.fault_tolerance.seams import settings
from moe_ft.loop.leaving import BreakpointWriter
from moe_ft.planning import levels
from tests.device.nccl import late_nccl

FAN_OUT = "TESTS_FAN_OUT"  # a variable: the most ranks of a group in levels


def use_defaults_of_gpus() -> None:
    """Keep all defaults that a GPU without Transformer Engine has, except for the backend.

    Fused functions run eagerly here, data have two workers, and batches are not pinned.
    """
    for name in [*os.environ]:
        if name.startswith("NVTE_"):  # from a process of tests in which Megatron has built a model
            del os.environ[name]
    loader: Any = torch.utils.data.DataLoader
    load = loader.__init__
    loader.__init__ = lambda self, *args, **given: load(
        self, *args, **{**given, "pin_memory": False}
    )
    cpu_device.set_cpu_defaults = lambda parser: parser.set_defaults(distributed_backend="gloo")


def train_with_defaults_of_gpus(flags: list[str]) -> None:
    """Train over gloo in this process, which ends with it."""
    use_defaults_of_gpus()
    pretrain_gpt_moe.main(flags)


def train_on_nccl(flags: list[str]) -> None:
    """Train over the stand-in for NCCL in this process, which ends with it."""
    use_defaults_of_gpus()
    levels.FAN_OUT = int(os.environ.get(FAN_OUT, levels.FAN_OUT))
    on_gpus: Any = SimpleNamespace(is_active=lambda: False)
    for module in (rules, seam, settings):
        module.cpu_device = on_gpus  # type: ignore[attr-defined]
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
