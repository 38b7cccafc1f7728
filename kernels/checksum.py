"""A 64-bit checksum of packed state that a GPU computes while it packs, and a CPU with numpy.

It is not xxh3, which files have: that is sequential within a stripe. Here words of 8 bytes are multiplied by
keys of their place and added up, chunk by chunk, and what chunks add up to is mixed and added up again. So it
does not matter in which order words are seen, and which word is where does.

A word that differs changes its chunk's sum for certain. Several that differ cancel with a probability of
about 2**-32 or less: the high half of a word is folded into the low one first, because a difference in
the highest bit alone is the same for every odd key.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

WORD_BYTES = 8
CHUNK_WORDS = 1024
CHUNK_BYTES = CHUNK_WORDS * WORD_BYTES
MOST_SIDE_WORDS = 64
_AT_ONCE = 64  # chunks, which with what is computed from them stay in a core's cache
_MASK = (1 << 64) - 1
# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Words = npt.NDArray[np.uint64]
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


def mix(numbers: Words) -> Words:
    """Return numbers whose bits all depend on all bits of the given ones (SplitMix64's finalizer)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


def series(count: int, start: int = 0) -> Words:
    """Return random numbers of places: keys of words, and what is added to the sums of chunks."""
    numbers = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return mix(numbers * np.uint64(_STEP))


# Of the places in a chunk and of its side words; odd, so that no word is lost.
KEYS = series(CHUNK_WORDS + MOST_SIDE_WORDS) | np.uint64(1)


def packed_checksum(content: Buffer, side: Buffer = b"", side_words: int = 0) -> int:
    """Return the checksum of bytes, 0 to 2**64 - 1; see `sum_chunks`. Their number is part of it."""
    return finish(sum_chunks(content, side, side_words), len(content))


def sum_chunks(content: Buffer, side: Buffer = b"", side_words: int = 0) -> int:
    """Return what the chunks of bytes add up to, 0 to 2**64 - 1: the checksum but for its last step.

    Args:
        content: contiguous, of any length; its end is filled up with zeros to a whole chunk.
        side: what else belongs to the chunks, such as scales; filled up with zeros too.
        side_words: how many words of it belong to each chunk, at most MOST_SIDE_WORDS.
    """
    data, beside = np.frombuffer(content, dtype=np.uint8), np.frombuffer(side, dtype=np.uint8)
    total, number = 0, 0
    for chunks in _rows(data, CHUNK_WORDS):
        count = len(chunks)
        sums = _weighted(chunks, KEYS[:CHUNK_WORDS])
        if side_words:
            row_bytes = side_words * WORD_BYTES
            part = beside[number * row_bytes : (number + count) * row_bytes]
            of_side = [_weighted(rows, KEYS[CHUNK_WORDS:]) for rows in _rows(part, side_words)]
            sums += np.concatenate(of_side)
        mixed = mix(sums + series(count, number))
        total = (total + int(mixed.sum(dtype=np.uint64))) & _MASK
        number += count
    return total


def finish(total: int, num_bytes: int) -> int:
    """Return the checksum of so many bytes whose chunks add up to a total, 0 to 2**64 - 1."""
    return int(mix(np.array([(total + num_bytes) & _MASK], dtype=np.uint64))[0])


def _weighted(rows: Words, keys: Words) -> Words:
    keyed = (rows ^ (rows >> np.uint64(32))) * keys[: rows.shape[1]]
    return keyed.sum(axis=1, dtype=np.uint64)


def _rows(data: npt.NDArray[np.uint8], words: int) -> Iterator[Words]:
    """Yield ``[row, word]`` whole rows of so many words, some at a time; the last one is filled up."""
    row_bytes = words * WORD_BYTES
    whole = len(data) // row_bytes * row_bytes
    step = _AT_ONCE * row_bytes
    for start in range(0, whole, step):
        part = data[start : min(start + step, whole)]
        yield part.view(np.uint64).reshape(-1, words)
    if whole < len(data):
        last = np.zeros(row_bytes, dtype=np.uint8)
        last[: len(data) - whole] = data[whole:]
        yield last.view(np.uint64).reshape(1, words)
