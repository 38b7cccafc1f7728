"""Check that the numbers of a state are finite: training could not continue from others. No torch."""

import numpy as np

from moe_ft.errors import CorruptStateError
from moe_ft.format.entries import UnitEntry, tensor_pieces
from moe_ft.format.packings import DTYPES

_BLOCK_BYTES = 1 << 20  # stays in a processor's cache


def check_is_finite(unit: str, entry: UnitEntry, content: memoryview) -> None:
    """Raise CorruptStateError if a number of a unit version is NaN or infinite: training could not continue.

    Args:
        content: its bytes.
    """
    for tensor in entry.tensors:
        for piece in tensor_pieces(tensor) if not tensor.is_absent else ():
            if not DTYPES[piece.dtype].not_finite:
                continue
            start = tensor.offset + piece.offset
            if not _are_finite(piece.dtype, content[start : start + piece.num_bytes]):
                raise CorruptStateError(
                    f"{tensor.key} of {tensor.parameter} in unit {unit} holds NaN or infinity"
                )


def _are_finite(dtype: str, content: memoryview) -> bool:
    kind = np.dtype(f"u{DTYPES[dtype].num_bytes}")
    bits, all_set = np.frombuffer(content, kind), kind.type(DTYPES[dtype].not_finite)
    block = min(len(bits), _BLOCK_BYTES // bits.itemsize)
    room = np.empty(block, kind)
    for start in range(0, len(bits), block or 1):
        part = bits[start : start + block]
        if np.bitwise_and(part, all_set, out=room[: len(part)]).max() == all_set:
            return False
    return True
