"""Exact sums of bits: any flipped bit, and what moves to another row, changes them."""

import pytest
import torch

from moe_ft.state.bit_sums import bit_sum

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_bit_of_a_tensor_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(9).to(dtype).view(3, 3)
    before = int(bit_sum(tensor))
    raw = tensor.view(-1).view(torch.uint8)
    for place in range(len(raw)):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert int(bit_sum(tensor)) != before, (place, bit)
            raw[place] ^= 1 << bit
    assert int(bit_sum(tensor)) == before


def test_each_bit_of_a_long_tensor_changes_its_sum_and_so_do_rows_that_change_places() -> None:
    tensor = torch.randn(3 * 4096 + 17, generator=torch.Generator().manual_seed(0))
    before = int(bit_sum(tensor))
    words = tensor.view(torch.int32)
    for place in (0, 4095, 4096, 3 * 4096 - 1, 3 * 4096, 3 * 4096 + 16):
        for bit in range(32):
            mask = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            words[place] ^= mask
            assert int(bit_sum(tensor)) != before, (place, bit)
            words[place] ^= mask
    assert int(bit_sum(tensor)) == before
    turned = torch.cat([tensor[4096:8192], tensor[:4096], tensor[8192:]])
    assert int(bit_sum(turned)) != before
    assert int(bit_sum(torch.empty(0))) == 0
    assert int(bit_sum(tensor[::2])) == int(bit_sum(tensor[::2].clone()))
