"""Tables pack the same tensors again and again, and refuse those that cannot be packed."""

import pytest
import torch

from kernels.block_scaling import ScaleKind
from kernels.number_formats import BF16
from kernels.pack_table import PackTable
from kernels.packing import Segment
from tests.unit.kernels.packs import DEVICE, empty_buffer, in_a_row, same_bits


def test_table_packs_and_unpacks_what_the_tensors_hold_then() -> None:
    tensor = torch.zeros(100, device=DEVICE)
    segments, num_bytes = in_a_row([Segment(tensor=tensor), Segment(tensor=tensor, to=BF16)])
    table, buffer = PackTable(segments), empty_buffer(num_bytes)
    for number in (1.5, -2.0):
        tensor.fill_(number)
        assert table.pack(buffer).tolist() == [0, 0]
        assert same_bits(buffer[:400], tensor)
        tensor.zero_()
        table.unpack(buffer)
        assert set(tensor.tolist()) == {number}


@pytest.mark.parametrize(
    ("segment", "rule"),
    [
        (Segment(tensor=torch.ones(4, 4).T), "flat"),
        (Segment(tensor=torch.ones(8)[::2]), "contiguous"),
        (Segment(tensor=torch.ones(4), offset=4), "multiples of 64"),
        (Segment(tensor=torch.ones(4), to=BF16, scales=ScaleKind.FP32), "8-bit"),
        (Segment(tensor=torch.ones(4, dtype=torch.int64), to=BF16), "int64 cannot be converted"),
        (Segment(tensor=torch.ones(4), weights=torch.ones(4)), "BF16 weights"),
        (Segment(tensor=torch.ones(4), weights=torch.ones(3).bfloat16()), "one shape"),
    ],
)
def test_segment_that_cannot_be_packed_is_refused(segment: Segment, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        PackTable([segment])


def test_nothing_is_packed_without_segments() -> None:
    assert PackTable([]).pack(torch.empty(0, dtype=torch.uint8)).shape == (0,)
