"""Weights that Transformer Engine keeps in few bits: FP8 parameters (--fp8-param-gather).

Each rank holds the fp32 masters of its slice, and they are the state. In each step Megatron rounds them to
the model's type (BF16) and casts that to bytes and scales: with scales that follow from the numbers (current
scaling, blocks, MXFP8), or with the scale of a module at that moment (delayed scaling), which records hold.
So a snapshot holds no bytes of these weights. A unit that only computes is saved as its masters in the
model's type, as of any other model; a restore writes these into the masters, and has Megatron cast them
(moe_ft/recovery/put_back.py).

Slices of data-parallel ranks cut the blocks that have one scale. Megatron's cast takes the largest number of
a block over these ranks, so where the slices end does not matter.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor

from moe_ft.arithmetic import ceil_div

# Attributes of Transformer Engine's tensors: bytes by rows, with scales, and by columns. `_transpose` are the
# bytes of a weight with one scale, in the other order.
_PARTS = (
    *("_data", "_scale_inv", "_transpose"),
    *("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"),
)


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether a tensor only pretends to have the type that it names."""
    return bool(is_float8tensor(parameter))


def quantized_parts(parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the bytes and the scales of a quantized tensor, with their names, as they are in memory.

    Bytes that the next forward pass makes again are left out, and so is the padding of scales.
    """
    for name in _PARTS:
        part = getattr(parameter, name, None)
        if not isinstance(part, torch.Tensor):
            continue
        if name == "_transpose" and getattr(parameter, "_transpose_invalid", False):
            continue
        yield name.removeprefix("_"), _without_padding(parameter, name, part)


def _without_padding(parameter: Any, name: str, part: torch.Tensor) -> torch.Tensor:
    """Return scales without those that fill a line: nobody writes them."""
    data = getattr(parameter, name.removesuffix("_scale_inv") + "_data", None)
    is_swizzled = getattr(parameter, "_with_gemm_swizzled_scales", False)
    if not name.endswith("wise_scale_inv") or data is None or part.dim() != 2 or is_swizzled:
        return part
    rows, columns = data.numel() // data.shape[-1], data.shape[-1]
    if getattr(parameter, "_is_2D_scaled", False):  # one for each block of 128 x 128 numbers
        return part[: ceil_div(rows, 128), : ceil_div(columns, 128)]
    if part.dtype is torch.uint8 and hasattr(parameter, "_fp8_dtype"):  # MXFP8
        if name.startswith("_row"):  # one for each 32 numbers of a row, or of a column
            return part[:rows, : ceil_div(columns, 32)]
        return part[: ceil_div(rows, 32), :columns]
    return part
