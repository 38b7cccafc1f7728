"""State that goes through small buffers arrives as if each tensor had been packed at once."""

import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.snapshots.staging import CUT, Chunk, PackedPart, Staging, cut_into_chunks
from moe_ft.errors import SnapshotError
from moe_ft.format.packings import ALIGNMENT_BYTES, DTYPE_BYTES, Packing
from tests.unit.moe_ft.engine.snapshots.test_packed import SEEDS, image_of, numbers_of, weights_of

KIB = 1024
FILLER = 0xA5
CPU = torch.device("cpu")
KINDS = [("F32", each) for each in Packing]
KINDS += [(each, Packing.EXACT) for each in sorted(DTYPE_BYTES) if each != "F32"]

Kind = tuple[str, Packing]
Wish = tuple[int, Kind, int]  # numbers, kind, empty lines before it


@dataclass(kw_only=True)
class State:
    """Tensors that are to lie in one file.

    Attributes:
        gaps: (start, end) of the bytes between their pieces, and around them.
    """

    file: mmap.mmap
    parts: list[PackedPart] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)


def whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def place(wishes: Sequence[Wish], seed: int) -> State:
    """Return tensors in a file, each at the first whole line behind the one before it."""
    file = mmap.mmap(-1, sum(whole_lines(9 * count) + 256 + 64 * gap for count, _, gap in wishes))
    file[:] = bytes([FILLER]) * len(file)
    state, end = State(file=file), 0
    for number, (count, (dtype, packing), gap) in enumerate(wishes):
        source = numbers_of(dtype, count, seed + number)
        part = PackedPart(
            name=f"tensor {number}",
            source=source,
            weights=weights_of(source, packing),
            dtype=dtype,
            packing=packing,
            file=file,
            offset=whole_lines(end) + ALIGNMENT_BYTES * gap,
        )
        state.parts.append(part)
        for start, piece_end in places_of(part):
            state.gaps.append((end, start))
            end = piece_end
    state.gaps.append((end, len(file)))
    return state


def places_of(part: PackedPart) -> list[tuple[int, int]]:
    """Return where the pieces of a tensor are in its file, each from, to."""
    return [
        (part.offset + piece.offset, part.offset + piece.offset + piece.num_bytes)
        for piece in part.pieces(len(part.source))
    ]


def cut(parts: Sequence[PackedPart], staging: Staging) -> list[Chunk]:
    """Return chunks that are ready to be packed."""
    chunks = list(cut_into_chunks(parts, staging.chunk_bytes))
    for chunk in chunks:
        chunk.finish()
    return chunks


def copy(state: State, num_bytes: int = 256 * KIB) -> list[Chunk]:
    """Copy everything; return the chunks that it was copied in."""
    staging = Staging(num_bytes, CPU)
    chunks = cut(state.parts, staging)
    staging.copy(chunks)
    staging.wait()
    return chunks


def has_arrived(part: PackedPart) -> bool:
    """Return whether a file has of a tensor what packing it at once would write."""
    image = image_of(part.packing, part.source, part.weights).numpy().tobytes()
    return all(
        part.file[start:end] == image[start - part.offset : end - part.offset]
        for start, end in places_of(part)
    )


EDGES = [1, 63, 64, 65, 127, 128, 129, 8191, 8192, 8193]
SMALL = st.sampled_from(EDGES) | st.integers(1, 9000)
LARGE = st.integers(16_000, 40_000)  # more than small buffers have room for


def wishes_of(counts: st.SearchStrategy[int], *, most: int) -> st.SearchStrategy[list[Wish]]:
    one = st.tuples(counts, st.sampled_from(KINDS), st.sampled_from([0, 0, 0, 1, 5]))
    return st.lists(one, min_size=1, max_size=most)


SMALL_WISHES = wishes_of(SMALL, most=5)
WISHES = st.tuples(
    wishes_of(SMALL, most=6), wishes_of(LARGE, most=3), wishes_of(SMALL | LARGE, most=4)
).map(lambda each: [*each[0], *each[1], *each[2]])
STAGINGS = st.sampled_from([256 * KIB, 300_001, 512 * KIB, 1024 * KIB])


# What arrives


@settings(max_examples=40)
@given(wishes=WISHES, seed=SEEDS, num_bytes=STAGINGS)
def test_tensors_of_any_kind_arrive_as_if_each_was_packed_at_once(
    wishes: list[Wish], seed: int, num_bytes: int
) -> None:
    state = place(wishes, seed)
    copy(state, num_bytes)
    assert [part.name for part in state.parts if not has_arrived(part)] == []


@settings(max_examples=40)
@given(wishes=WISHES, seed=SEEDS, num_bytes=STAGINGS)
def test_nothing_else_is_written_but_zeros_between_pieces_on_neighbouring_lines(
    wishes: list[Wish], seed: int, num_bytes: int
) -> None:
    state = place(wishes, seed)
    copy(state, num_bytes)
    for start, end in state.gaps:
        found = set(state.file[start:end])
        is_inside = start > 0 and end < len(state.file) and end - start < ALIGNMENT_BYTES
        assert found <= {FILLER} or (is_inside and found == {0})


@settings(max_examples=30)
@given(wishes=SMALL_WISHES, seeds=st.tuples(SEEDS, SEEDS), num_bytes=STAGINGS)
def test_tensors_that_changed_arrive_with_the_same_tables(
    wishes: list[Wish], seeds: tuple[int, int], num_bytes: int
) -> None:
    state, later = place(wishes, seeds[0]), place(wishes, seeds[1])
    staging = Staging(num_bytes, CPU)
    chunks = cut(state.parts, staging)
    staging.copy(chunks)
    for part, other in zip(state.parts, later.parts, strict=True):
        part.source.copy_(other.source)
        if part.weights is not None:
            assert other.weights is not None
            part.weights.copy_(other.weights)
    staging.copy(chunks)
    assert [part.name for part in state.parts if not has_arrived(part)] == []
    for chunk in chunks:
        chunk.check()


# How tensors are cut


def test_large_tensor_is_cut_into_chunks_as_worked_by_hand() -> None:
    state = place([(40_000, ("F32", Packing.SPLIT), 0)], 0)
    chunks = copy(state)
    # 8192 of its numbers take 32 KiB, and 1 KiB of carries: three times that is in 128 KiB.
    assert [[len(each.tensor) for each in chunk.segments] for chunk in chunks] == [
        [24_576, 24_576],
        [15_424, 15_424],
    ]
    # Parts of pieces are no neighbours in the file.
    assert [[len(target) for _, target in chunk.copies] for chunk in chunks] == [
        [49_152, 49_152, 3072],
        [30_848, 30_848, 1928],
    ]


# What is checked


@pytest.mark.parametrize("wrong", [[0], [8191], [8192], [39_999], [7, 8, 9]])
def test_weights_that_were_not_rounded_from_their_masters_are_refused(wrong: list[int]) -> None:
    state = place([(40_000, ("F32", Packing.SPLIT), 0)], 0)
    (part,) = state.parts
    assert part.weights is not None
    part.source[wrong], part.weights[wrong] = 1.0, 2.0
    chunks = copy(state)
    message = (
        f"{len(wrong)} weights of tensor 0 are not their fp32 masters rounded to BF16, so these "
        "cannot be split: use master=exact"
    )
    with pytest.raises(SnapshotError, match=f"^{re.escape(message)}$"):
        for chunk in chunks:
            chunk.check()


def test_file_stays_mapped_as_long_as_a_chunk_is_to_be_copied_into_it() -> None:
    state = place([(CUT, ("F32", Packing.EXACT), 0)], seed=0)
    chunks = cut(state.parts, Staging(256 * KIB, CPU))
    with pytest.raises(BufferError):
        state.file.close()
    del chunks
    state.file.close()
