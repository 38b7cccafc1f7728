"""Kernels on a GPU give the bits of their reference, and staging brings them into pinned memory.

tests/unit/moe_ft/kernels tests the same in Triton's interpreter, or on a GPU where there is one.
"""

import mmap
from dataclasses import replace

import pytest
import torch

from moe_ft.engine.snapshots.staging import CUT, PackedPart, Staging, cut_into_chunks
from moe_ft.format.packings import Packing
from moe_ft.kernels.packing import Segment, pack_by_reference, unpack_by_reference
from moe_ft.kernels.triton_packing import KernelTable
from tests.unit.moe_ft.engine.snapshots.test_staging import has_arrived
from tests.unit.moe_ft.kernels.packs import in_a_row, of_all_kinds, on_host, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PACKINGS = [each for each in Packing if each is not Packing.SPLIT]


@pytest.mark.parametrize("count", [1, 127, 8193, 1_000_003, 20_000_000])
def test_kernels_pack_and_unpack_to_the_bits_of_the_reference(count: int) -> None:
    segments, num_bytes = in_a_row(of_all_kinds(count, seed=count))
    reference = on_host(segments)
    expected = torch.zeros(num_bytes, dtype=torch.uint8)
    found = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    num_wrong = pack_by_reference(reference, expected)
    assert torch.equal(KernelTable(segments).pack(found).cpu(), num_wrong)
    assert same_bits(found, expected)
    for on_device, on_cpu in zip(segments, reference, strict=True):
        on_device.tensor.zero_()
        KernelTable([on_device]).unpack(found)
        unpack_by_reference([on_cpu], expected)
        assert same_bits(on_device.tensor, on_cpu.tensor)


@pytest.mark.parametrize("staging_bytes", [1 << 20, 64 << 20])
def test_staging_brings_what_was_packed_into_pinned_memory(staging_bytes: int) -> None:
    sizes = [5 * CUT + 3, 1, 700, 3_000_000, *([129] * 2000)]
    sources = [torch.randn(size, device="cuda") for size in sizes]
    file = mmap.mmap(-1, 64 << 20)
    pinned = torch.frombuffer(file, dtype=torch.uint8)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pinned.data_ptr(), len(file), 0))
    parts, end = [], 0
    for index, source in enumerate(sources):
        packing = PACKINGS[index % len(PACKINGS)]
        parts.append(
            PackedPart(
                name=str(index),
                source=source,
                weights=None,
                dtype="F32",
                packing=packing,
                file=file,
                offset=end,
            )
        )
        end += parts[-1].buffer_bytes(len(source))
    staging = Staging(staging_bytes, torch.device("cuda"))
    chunks = list(cut_into_chunks(parts, staging.chunk_bytes))
    for chunk in chunks:
        chunk.finish()
    for _ in range(3):  # over the same buffers
        for source in sources:
            source.normal_()
        staging.copy(chunks)
        staging.wait()
        copies = [replace(part, source=part.source.cpu()) for part in parts]
        assert [part.name for part in copies if not has_arrived(part)] == []
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr()))


def test_whole_tensors_of_more_than_4_gib_are_packed() -> None:
    source = torch.ones((1 << 30) + 5, device="cuda")
    source[-5:] = torch.arange(5.0, device="cuda")
    segment = Segment(tensor=source)
    buffer = torch.zeros(segment.num_bytes + 64, dtype=torch.uint8, device="cuda")
    KernelTable([segment]).pack(buffer)
    assert same_bits(buffer[segment.num_bytes - 20 : segment.num_bytes], source[-5:])
