"""Entries: the order of versions, and the sizes and packings of tensors."""

import msgspec
import pytest

from moe_ft.format.entries import (
    TensorEntry,
    UnitEntry,
    lossy_packings,
    tensor_bytes,
    tensor_pieces,
)
from moe_ft.format.packings import Packing
from tests.unit.moe_ft.format.bodies import small_index


def tensor(key: str, packing: Packing, *, is_absent: bool = False) -> TensorEntry:
    return TensorEntry("a.weight", key, 100, 300, "F32", 0, is_absent, packing.value)


def unit(*tensors: TensorEntry) -> UnitEntry:
    return UnitEntry(0, 4096, 1, "full", "0" * 16, tensors)


def test_version_of_a_later_incarnation_is_newer_whatever_its_iteration() -> None:
    unit = small_index().units["embedding"]
    later = msgspec.structs.replace(unit, incarnation=1, iteration=0)
    assert later.version > unit.version


@pytest.mark.parametrize(
    ("packing", "num_bytes"),
    [(Packing.EXACT, 800), (Packing.BF16, 400), (Packing.E4M3, 200), (Packing.E4M3_BLOCKS, 264)],
)
def test_bytes_of_a_tensor_reach_from_its_start_to_the_end_of_its_last_piece(
    packing: Packing, num_bytes: int
) -> None:
    entry = tensor("param", packing)
    assert tensor_bytes(entry) == num_bytes
    assert tensor_pieces(entry)[0].count == 200


def test_packings_that_lose_bits_are_named_by_key_in_ascending_order() -> None:
    first = unit(tensor("param", Packing.SPLIT), tensor("exp_avg", Packing.FP16))
    second = unit(tensor("weight", Packing.EXACT), tensor("exp_avg", Packing.BF16))
    assert lossy_packings([first, second]) == {"exp_avg": "bf16 or fp16"}


def test_absent_tensor_has_no_packing_to_name() -> None:
    assert lossy_packings([unit(tensor("exp_avg", Packing.BF16, is_absent=True))]) == {}
