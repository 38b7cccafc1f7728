"""pretrain_gpt_moe.py in which ranks raise exceptions of their own.

RAISING has samples of the data set that cannot be read (sample:33), and ranks whose device has no memory left
in a forward pass of an iteration from 0, once (memory:1@4). Files that are named after RAISING_MARKER say so.
"""

import os
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_args

import pretrain_gpt_moe
from megatron.fault_tolerance.seams.patching import Patches

read = GPTDataset.__getitem__
faults = os.environ["RAISING"].split()


def read_or_raise(data_set: Any, index: int | None) -> Any:
    """Read a sample, unless it is a bad one."""
    if f"sample:{index}" in faults:
        raise ValueError(f"sample {index} cannot be read")
    return read(data_set, index)


def run_or_raise(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a forward pass, or fail in the first one of an iteration."""
    place = f"{os.environ['RANK']}@{get_args().curr_iteration}"
    marker = Path(f"{os.environ['RAISING_MARKER']}_{place}")
    if f"memory:{place}" in faults and not marker.exists():
        marker.touch()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return original(*args, **kwargs)


if __name__ == "__main__":
    with Patches() as patches:
        patches.set(GPTDataset, "__getitem__", read_or_raise)
        patches.wrap(pretrain_gpt_moe, "forward_step", run_or_raise)
        pretrain_gpt_moe.main()
