"""The checksum is the same however bytes are read, and differs for whatever may go wrong on the way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.checksum import (
    CHUNK_BYTES,
    CHUNK_WORDS,
    KEYS,
    MOST_SIDE_WORDS,
    mix,
    packed_checksum,
)

SIZES = (0, 1, 7, 8, 9, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 8, 70 * CHUNK_BYTES + 13)


def some_bytes(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def by_hand(content: bytes) -> int:
    """Return the checksum in Python's integers, word by word."""
    mask = 2**64 - 1
    padded = content + bytes(-len(content) % CHUNK_BYTES)

    def finish(number: int) -> int:
        number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
        number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
        return number ^ (number >> 31)

    def series(place: int) -> int:
        return finish(((place + 1) * 0x9E3779B97F4A7C15) & mask)

    total = 0
    for chunk in range(len(padded) // CHUNK_BYTES):
        part = padded[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        added = 0
        for place in range(CHUNK_WORDS):
            word = int.from_bytes(part[8 * place : 8 * place + 8], "little")
            added += (word ^ (word >> 32)) * (series(place) | 1)
        total += finish((added + series(chunk)) & mask)
    return finish((total + len(content)) & mask)


@pytest.mark.parametrize("count", SIZES[:-1])
def test_checksum_is_what_its_definition_says(count: int) -> None:
    content = some_bytes(count)
    assert packed_checksum(content) == by_hand(content)


@pytest.mark.parametrize("count", SIZES)
def test_checksum_of_a_view_is_that_of_its_bytes(count: int) -> None:
    content = some_bytes(count)
    inside = memoryview(bytearray(b"x" + content + b"y"))[1 : 1 + count]  # not aligned
    assert packed_checksum(inside) == packed_checksum(content)


@settings(max_examples=100)
@given(count=st.integers(1, 3 * CHUNK_BYTES), place=st.integers(0, 2**31), bit=st.integers(0, 7))
def test_every_flipped_bit_is_seen(count: int, place: int, bit: int) -> None:
    content = bytearray(some_bytes(count))
    before = packed_checksum(bytes(content))
    content[place % count] ^= 1 << bit
    assert packed_checksum(bytes(content)) != before


def test_two_flipped_signs_do_not_cancel() -> None:
    # In a plain sum of products with odd keys they always would.
    content = some_bytes(2 * CHUNK_BYTES)
    before, generator = packed_checksum(content), np.random.default_rng(1)
    for _ in range(300):
        first, second = generator.choice(2 * CHUNK_WORDS, 2, replace=False)
        changed = bytearray(content)
        for word in (first, second):
            changed[8 * word + 7] ^= 0x80
        assert packed_checksum(bytes(changed)) != before


@pytest.mark.parametrize("size", [8, 64, CHUNK_BYTES])
def test_pieces_that_changed_places_are_seen(size: int) -> None:
    content = some_bytes(4 * CHUNK_BYTES)
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    pieces[0], pieces[-1] = pieces[-1], pieces[0]
    assert packed_checksum(b"".join(pieces)) != packed_checksum(content)


def test_zeros_of_different_lengths_differ() -> None:
    found = {packed_checksum(bytes(count)) for count in (*range(64), *SIZES)}
    assert len(found) == len({*range(64), *SIZES})


def test_keys_are_odd_and_all_different() -> None:
    assert len(set(KEYS.tolist())) == CHUNK_WORDS + MOST_SIDE_WORDS
    assert (KEYS % 2 == 1).all()


def test_mixing_loses_nothing() -> None:
    numbers = np.arange(10_000, dtype=np.uint64)
    assert len(set(mix(numbers).tolist())) == 10_000
