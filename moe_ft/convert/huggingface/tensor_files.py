"""Safetensors of a source, on this machine or at a URL: their tensors by name, and reading one of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from safetensors import SafetensorError, safe_open

from moe_ft.convert.remote_path import AnyPath, RemotePath
from moe_ft.errors import CorruptStateError
from moe_ft.format.packings import DTYPE_BYTES
from moe_ft.state.slices import DTYPES

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as the library has it


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor: its file, shape and type; at a URL also where its bytes begin."""

    path: AnyPath
    shape: tuple[int, ...]
    dtype: str
    start: int = 0

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptStateError(f"{what} cannot be read: {error}") from error


def list_tensors(path: AnyPath) -> dict[str, Place]:
    """Return the tensors of a file by name.

    Raises:
        CorruptStateError: if it is cut short or damaged.
    """
    with _reading(str(path)):
        if isinstance(path, RemotePath):
            return _list_remote(path)
        with safe_open(path, framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Place(path, tuple(each.get_shape()), each.get_dtype())
                for name, each in parts.items()
            }


def read_tensor(name: str, place: Place) -> torch.Tensor:
    """Return a tensor.

    Raises:
        CorruptStateError: if its file is cut short or damaged.
    """
    with _reading(f"{place.path}: {name}"):
        if isinstance(place.path, RemotePath):
            return _read_remote(place.path, place)
        with safe_open(place.path, framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
            return found


def _list_remote(path: RemotePath) -> dict[str, Place]:
    with path.open() as file:
        num_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if num_bytes > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has {num_bytes} bytes")
        start = _LENGTH_BYTES + num_bytes
        tensors = json.loads(file.read(num_bytes))
        tensors.pop("__metadata__", None)
        found, end = {}, 0
        for name, each in tensors.items():
            first, last = each["data_offsets"]
            place = Place(path, tuple(each["shape"]), each["dtype"], start + first)
            if last - first != place.num_bytes:
                raise ValueError(f"{name} has {last - first} bytes, and its shape {each['shape']}")
            found[name], end = place, max(end, last)
        if start + end != file.num_bytes:
            raise ValueError(f"it has {file.num_bytes} bytes, and its header says {start + end}")
    return found


def _read_remote(path: RemotePath, place: Place) -> torch.Tensor:
    content = bytearray(path.storage.read(path.path, place.start, place.num_bytes))
    if len(content) != place.num_bytes:
        raise ValueError("it is cut short")
    if not content:
        return torch.empty(place.shape, dtype=DTYPES[place.dtype])
    return torch.frombuffer(content, dtype=DTYPES[place.dtype]).view(place.shape)
