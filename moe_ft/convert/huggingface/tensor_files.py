"""Safetensors of a source, on this machine or at a URL: their tensors by name, and reading one of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import msgspec
import torch

from moe_ft.convert.foreign_files import read_range, size_of
from moe_ft.convert.remote_path import AnyPath
from moe_ft.errors import CorruptStateError
from moe_ft.format.packings import DTYPE_BYTES
from moe_ft.state.slices import DTYPES

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as the library has it


class _Described(msgspec.Struct, frozen=True):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DESCRIBED = msgspec.json.Decoder(_Described)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor: its file, shape and type, and where its bytes begin."""

    path: AnyPath
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.numel * DTYPE_BYTES[self.dtype]


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except CorruptStateError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptStateError(f"{what} cannot be read: {error}") from error


def list_tensors(path: AnyPath) -> dict[str, Place]:
    """Return the tensors of a file by name.

    Raises:
        CorruptStateError: if it is cut short, damaged, or no regular file.
    """
    with _reading(str(path)):
        size = size_of(path)
        num_bytes = int.from_bytes(read_range(path, 0, _LENGTH_BYTES), "little")
        start = _LENGTH_BYTES + num_bytes
        if num_bytes > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has {num_bytes} bytes")
        tensors = _HEADER.decode(read_range(path, _LENGTH_BYTES, num_bytes))
        tensors.pop("__metadata__", None)
        found, end = {}, 0
        for name, raw in tensors.items():
            place, last = _place(path, name, _DESCRIBED.decode(raw), start)
            found[name], end = place, max(end, last)
        if start + end != size:
            raise ValueError(f"it has {size} bytes, and its header says {start + end}")
    return found


def _place(path: AnyPath, name: str, each: _Described, start: int) -> tuple[Place, int]:
    """Return the place of a tensor, and where it ends after the header."""
    first, last = each.data_offsets
    if each.dtype not in DTYPES:
        raise ValueError(f"{name} has the type {each.dtype}, which is not known")
    place = Place(path, each.shape, each.dtype, start + first)
    if min(first, *each.shape, 0) < 0 or last - first != place.num_bytes:
        raise ValueError(f"{name} has {last - first} bytes, and its shape {list(each.shape)}")
    return place, last


def read_tensor(name: str, place: Place) -> torch.Tensor:
    """Return a tensor.

    Raises:
        CorruptStateError: if its file is cut short or damaged.
    """
    with _reading(f"{place.path}: {name}"):
        content = read_range(place.path, place.start, place.num_bytes)
        if len(content) != place.num_bytes:
            raise ValueError("it is cut short")
        if not content:
            return torch.empty(place.shape, dtype=DTYPES[place.dtype])
        return torch.frombuffer(content, dtype=DTYPES[place.dtype]).view(place.shape)
