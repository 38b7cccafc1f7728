"""Segments for tests: tensors of every type, of odd sizes and anywhere in memory, one behind the other."""

from dataclasses import replace

import torch

from moe_ft.kernels.number_formats import E4M3, E5M2, FORMATS, FP32, ScaleKind, round_to
from moe_ft.kernels.packing import Segment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOT_BYTES = 64


def any_numbers(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return fp32 of random bits: of every size, subnormal numbers, infinities and NaN included."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
    return bits.view(torch.float32)


def in_a_row(segments: list[Segment]) -> tuple[list[Segment], int]:
    """Return segments with offsets, and the bytes that a buffer of them has."""
    placed, end = [], 0

    def place(num_bytes: int) -> int:
        nonlocal end
        start, end = end, end + -(-num_bytes // SLOT_BYTES) * SLOT_BYTES
        return start

    for segment in segments:
        offset = place(segment.num_bytes)
        placed.append(replace(segment, offset=offset, side_offset=place(segment.side_bytes)))
    return placed, end


def of_all_kinds(count: int, seed: int = 0) -> list[Segment]:
    """Return segments of so many numbers: every type as it is, and in every format."""
    generator = torch.Generator().manual_seed(seed)
    wide = any_numbers(count + 3, generator).to(DEVICE)
    masters = any_numbers(count, generator).to(DEVICE)
    found = [
        Segment(tensor=wide[1 : count + 1]),  # not where a vector could begin
        Segment(tensor=wide[1 : count + 1], to=E4M3),
        Segment(tensor=wide[2 : count + 2], to=FP32),
        Segment(tensor=masters, weights=masters.to(torch.bfloat16)),
        Segment(tensor=torch.randint(0, 2**60, (count,), generator=generator).to(DEVICE)),
        Segment(tensor=(torch.rand(count, generator=generator) > 0.5).to(DEVICE)),
    ]
    for of in (E4M3, E5M2):
        for scales in ScaleKind:
            found.append(Segment(tensor=wide[:count], to=of, scales=scales))
            found.append(Segment(tensor=wide[3:], to=of, scales=scales))
    for of in FORMATS.values():
        found.append(Segment(tensor=wide[:count], to=of))
        numbers = round_to(any_numbers(count, generator), of).to(DEVICE)
        found.append(Segment(tensor=numbers))
        found += [Segment(tensor=numbers, to=to) for to in (FP32, *FORMATS.values())]
        found.append(Segment(tensor=numbers, to=E4M3, scales=ScaleKind.FP32))
    return found


def on_host(segments: list[Segment]) -> list[Segment]:
    """Return segments with copies of their tensors in host memory."""
    return [
        replace(
            each,
            tensor=each.tensor.cpu().clone(),
            weights=None if each.weights is None else each.weights.cpu(),
        )
        for each in segments
    ]


def empty_buffer(num_bytes: int) -> torch.Tensor:
    """Return a buffer whose bytes are none that packing would write."""
    return torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device=DEVICE)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same bytes."""
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))
