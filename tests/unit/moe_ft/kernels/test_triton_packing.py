"""The kernels pack and unpack to the same bits as their reference; test_kernel_code.py compiles them."""

import pytest
import torch

from moe_ft.kernels.number_formats import FORMATS, NumberFormat
from moe_ft.kernels.packing import Segment, pack_by_reference, unpack_by_reference
from moe_ft.kernels.triton_packing import KernelTable
from tests.unit.moe_ft.kernels.packs import empty_buffer, in_a_row, of_all_kinds, on_host, same_bits


@pytest.mark.parametrize("count", [1, 127, 2048, 4097])
def test_kernel_packs_what_the_reference_packs(count: int) -> None:
    segments, num_bytes = in_a_row(of_all_kinds(count, seed=count))
    expected, found = empty_buffer(num_bytes).cpu(), empty_buffer(num_bytes)
    of_reference = on_host(segments)
    num_wrong = pack_by_reference(of_reference, expected)
    assert torch.equal(KernelTable(segments).pack(found).cpu(), num_wrong)
    assert same_bits(found, expected)


@pytest.mark.parametrize("count", [127, 4097])
def test_each_kind_is_unpacked_as_the_reference_does(count: int) -> None:
    segments, num_bytes = in_a_row(of_all_kinds(count, seed=count))
    buffer = empty_buffer(num_bytes)
    KernelTable(segments).pack(buffer)
    for segment in segments:
        (reference,) = on_host([segment])
        unpack_by_reference([reference], buffer.cpu())
        segment.tensor.zero_()
        KernelTable([segment]).unpack(buffer)
        assert same_bits(segment.tensor, reference.tensor)


@pytest.mark.parametrize("shift", [0, 12, 13, 15])
def test_neighbours_of_all_ties_are_rounded_as_the_reference_does(shift: int) -> None:
    # Every upper half, with lower bits around each tie that is among them, also of subnormal results.
    uppers = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    beside = torch.tensor([-1, 0, 1], dtype=torch.int32)[:, None]
    numbers = (uppers + (1 << shift) + beside).reshape(-1).view(torch.float32)
    numbers = numbers.to(empty_buffer(0).device)
    segments, num_bytes = in_a_row([Segment(tensor=numbers, to=of) for of in FORMATS.values()])
    expected, found = empty_buffer(num_bytes).cpu(), empty_buffer(num_bytes)
    pack_by_reference(on_host(segments), expected)
    KernelTable(segments).pack(found)
    assert same_bits(found, expected)


@pytest.mark.parametrize("of", FORMATS.values(), ids=FORMATS)
def test_all_codes_are_widened_as_the_reference_does(of: NumberFormat) -> None:
    codes = torch.arange(2 ** (8 * of.num_bytes)).to(of.code_dtype).view(torch.uint8)
    numbers = torch.zeros(len(codes) // of.num_bytes, device=empty_buffer(0).device)
    segment = Segment(tensor=numbers, to=of)
    (reference,) = on_host([segment])
    unpack_by_reference([reference], codes)
    KernelTable([segment]).unpack(codes.to(numbers.device))
    assert same_bits(numbers, reference.tensor)


def test_thousands_of_tensors_go_in_one_launch() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 60, (1500,), generator=generator).tolist()
    device = empty_buffer(0).device
    flat = torch.randn(sum(sizes), generator=generator).to(device)
    segments, num_bytes = in_a_row([Segment(tensor=each) for each in flat.split(sizes)])
    buffer = empty_buffer(num_bytes)
    KernelTable(segments).pack(buffer)
    for segment, numbers in zip(segments, flat.split(sizes), strict=True):
        assert same_bits(buffer[segment.offset : segment.offset + segment.num_bytes], numbers)


def test_weights_that_are_not_of_their_masters_are_counted() -> None:
    masters = torch.randn(9000).to(empty_buffer(0).device)
    weights = masters.to(torch.bfloat16)
    weights[[3, 5000, 8999]] += 1
    segments, num_bytes = in_a_row([Segment(tensor=masters, weights=weights)])
    assert KernelTable(segments).pack(empty_buffer(num_bytes)).tolist() == [3]
