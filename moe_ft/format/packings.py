"""Packings of state tensors in files: unchanged, rounded to fewer bits, or split into parts.

This file holds names, sizes and places, and no torch. The formats are defined in
moe_ft/kernels/number_formats.py, packed by moe_ft/kernels/packing.py and chosen by moe_ft/config/strategy.py.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from moe_ft.arithmetic import ceil_div, round_up


class DType(NamedTuple):
    """Type of numbers.

    Attributes:
        torch_name: its attribute of torch, and its name in the settings of models.
        not_finite: bits of a number that are all set if it is NaN or infinite, and only then; 0 for integers.
    """

    torch_name: str
    num_bytes: int
    not_finite: int = 0


# By safetensors' name.
DTYPES = {
    "F64": DType("float64", 8, 0x7FF0_0000_0000_0000),
    "I64": DType("int64", 8),
    "F32": DType("float32", 4, 0x7F80_0000),
    "I32": DType("int32", 4),
    "F16": DType("float16", 2, 0x7C00),
    "BF16": DType("bfloat16", 2, 0x7F80),
    "I16": DType("int16", 2),
    "F8_E4M3": DType("float8_e4m3fn", 1, 0x7F),  # has no infinity
    "F8_E5M2": DType("float8_e5m2", 1, 0x7C),
    "I8": DType("int8", 1),
    "U8": DType("uint8", 1),
    "BOOL": DType("bool", 1),
}
DTYPE_BYTES = {name: each.num_bytes for name, each in DTYPES.items()}
ALIGNMENT_BYTES = 64  # of tensors in a file, and of their pieces
SCALED_BLOCK = 128  # numbers that share a scale


class Packing(StrEnum):
    """Ways to keep fp32 numbers."""

    EXACT = "exact"
    SPLIT = "split"  # masters as BF16 weights and the bits that these leave out
    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "fp8-e4m3"
    E5M2 = "fp8-e5m2"
    # With an fp32 scale, or one that is a power of two, for each block of numbers.
    E4M3_BLOCKS = "fp8-e4m3-block"
    E5M2_BLOCKS = "fp8-e5m2-block"
    E4M3_POWER_BLOCKS = "fp8-e4m3-block-pow2"
    E5M2_POWER_BLOCKS = "fp8-e5m2-block-pow2"

    @property
    def is_lossy(self) -> bool:
        """True if restored numbers differ from the saved ones."""
        return self not in (Packing.EXACT, Packing.SPLIT)


_SHORT_DTYPES = {
    Packing.BF16: "BF16",
    Packing.FP16: "F16",
    Packing.E4M3: "F8_E4M3",
    Packing.E5M2: "F8_E5M2",
    Packing.E4M3_BLOCKS: "F8_E4M3",
    Packing.E5M2_BLOCKS: "F8_E5M2",
    Packing.E4M3_POWER_BLOCKS: "F8_E4M3",
    Packing.E5M2_POWER_BLOCKS: "F8_E5M2",
}
_SCALED = (
    Packing.E4M3_BLOCKS,
    Packing.E5M2_BLOCKS,
    Packing.E4M3_POWER_BLOCKS,
    Packing.E5M2_POWER_BLOCKS,
)


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """A part of a packed tensor; safetensors sees it as a tensor of its own.

    Attributes:
        name: empty if the tensor has only one part.
        offset: in bytes, from the start of the packed tensor.
    """

    name: str
    dtype: str
    count: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size without padding."""
        return self.count * DTYPE_BYTES[self.dtype]


@cache
def pieces(dtype: str, count: int, packing: Packing) -> tuple[PackedPiece, ...]:
    """Return the parts of a packed tensor in a file.

    Args:
        dtype: safetensors' name of the type that the live tensor has; all packings but EXACT require F32.
    """
    if packing is Packing.EXACT:
        return (PackedPiece("", dtype, count, 0),)
    if packing is Packing.SPLIT:
        parts = [
            ("weight", "BF16", count),
            ("remainder", "I16", count),
            ("carry", "U8", ceil_div(count, 8)),
        ]
    else:
        parts = [("", _SHORT_DTYPES[packing], count)]
        if packing in _SCALED:
            parts.append(("scale", "F32", ceil_div(count, SCALED_BLOCK)))
    found: list[PackedPiece] = []
    end = 0
    for name, piece_dtype, piece_count in parts:
        start = round_up(end, ALIGNMENT_BYTES)
        found.append(PackedPiece(name, piece_dtype, piece_count, start))
        end = start + found[-1].num_bytes
    return tuple(found)
