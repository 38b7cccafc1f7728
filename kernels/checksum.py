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
_AT_ONCE = 64  # chunks, which with what is computed from them stay in a core's cache
_MASK = (1 << 64) - 1
# SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Words = npt.NDArray[np.uint64]


def mix(numbers: Words) -> Words:
    """Return numbers whose bits all depend on all bits of the given ones (SplitMix64's finalizer)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


def _series(count: int, start: int = 0) -> Words:
    numbers = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return mix(numbers * np.uint64(_STEP))


KEYS = _series(CHUNK_WORDS) | np.uint64(1)  # of the places in a chunk; odd, so that no word is lost


def packed_checksum(content: bytes | memoryview) -> int:
    """Return the checksum of bytes, 0 to 2**64 - 1.

    Args:
        content: contiguous, of any length. Its end is filled up with zeros to a whole chunk, and its length
            is part of the checksum.
    """
    data = np.frombuffer(content, dtype=np.uint8)
    total, number = 0, 0
    for chunks in _chunks(data):
        sums = ((chunks ^ (chunks >> np.uint64(32))) * KEYS).sum(axis=1, dtype=np.uint64)
        mixed = mix(sums + _series(len(chunks), number))
        total = (total + int(mixed.sum(dtype=np.uint64))) & _MASK
        number += len(chunks)
    return int(mix(np.array([(total + len(data)) & _MASK], dtype=np.uint64))[0])


def _chunks(data: npt.NDArray[np.uint8]) -> Iterator[Words]:
    """Yield ``[chunk, word]`` the words of whole chunks, some at a time; the last chunk is filled up."""
    whole = len(data) // CHUNK_BYTES * CHUNK_BYTES
    step = _AT_ONCE * CHUNK_BYTES
    for start in range(0, whole, step):
        part = data[start : min(start + step, whole)]
        yield part.view(np.uint64).reshape(-1, CHUNK_WORDS)
    if whole < len(data):
        last = np.zeros(CHUNK_BYTES, dtype=np.uint8)
        last[: len(data) - whole] = data[whole:]
        yield last.view(np.uint64).reshape(1, CHUNK_WORDS)
