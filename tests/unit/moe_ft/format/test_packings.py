"""Packed tensors have the pieces that their formats say, each at its place."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.format.packings import (
    ALIGNMENT_BYTES,
    PackedPiece,
    Packing,
    pieces,
)

COUNTS = st.sampled_from([0, 1, 7, 8, 9, 31, 32, 33, 127, 128, 129, 8192]) | st.integers(0, 10**7)
BLOCKS_OF_E4M3 = [Packing.E4M3_BLOCKS, Packing.E4M3_POWER_BLOCKS]
BLOCKS_OF_E5M2 = [Packing.E5M2_BLOCKS, Packing.E5M2_POWER_BLOCKS]


@pytest.mark.parametrize(
    ("packing", "dtype", "num_bytes"),
    [
        (Packing.BF16, "BF16", 258),
        (Packing.FP16, "F16", 258),
        (Packing.E4M3, "F8_E4M3", 129),
        (Packing.E5M2, "F8_E5M2", 129),
    ],
)
def test_rounded_tensor_is_one_piece_of_the_shorter_type(
    packing: Packing, dtype: str, num_bytes: int
) -> None:
    (piece,) = pieces("F32", 129, packing)
    assert piece == PackedPiece("", dtype, 129, 0)
    assert piece.num_bytes == num_bytes


@pytest.mark.parametrize(
    ("count", "num_scales", "at"), [(0, 0, 0), (1, 1, 64), (128, 1, 128), (129, 2, 192)]
)
@pytest.mark.parametrize(
    ("packing", "dtype"),
    [(each, "F8_E4M3") for each in BLOCKS_OF_E4M3] + [(each, "F8_E5M2") for each in BLOCKS_OF_E5M2],
)
def test_scales_follow_their_numbers_one_for_each_begun_block(
    packing: Packing, dtype: str, count: int, num_scales: int, at: int
) -> None:
    numbers, scales = pieces("F32", count, packing)
    assert numbers == PackedPiece("", dtype, count, 0)
    assert scales == PackedPiece("scale", "F32", num_scales, at)
    assert (numbers.num_bytes, scales.num_bytes) == (count, 4 * num_scales)


@pytest.mark.parametrize(
    ("count", "remainder_at", "carry_at", "carry_bytes"),
    [(0, 0, 0, 0), (1, 64, 128, 1), (128, 256, 512, 16), (129, 320, 640, 17)],
)
def test_split_masters_are_weights_remainders_and_a_bit_for_each(
    count: int, remainder_at: int, carry_at: int, carry_bytes: int
) -> None:
    assert pieces("F32", count, Packing.SPLIT) == (
        PackedPiece("weight", "BF16", count, 0),
        PackedPiece("remainder", "I16", count, remainder_at),
        PackedPiece("carry", "U8", carry_bytes, carry_at),
    )


@given(packing=st.sampled_from(Packing), count=COUNTS)
def test_pieces_lie_one_behind_the_other_and_never_overlap(packing: Packing, count: int) -> None:
    found = pieces("F32", count, packing)
    assert found[0].offset == 0
    for before, behind in pairwise(found):
        gap = behind.offset - (before.offset + before.num_bytes)
        assert 0 <= gap < ALIGNMENT_BYTES
