"""A set of safetensors files with the units' names: model-00001-of-00003.safetensors, ... and an index.

A tensor is called UNIT/NAME, and UNIT/NAME/KIND if it is not the weight. The index, as Hugging Face has it
(model.safetensors.index.json), also says which iteration each unit is from and what was lost. Files are
written without a second copy of their tensors in memory: the library's own writer makes bytes of all first.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, override

import msgspec
import torch

from moe_ft.convert.foreign_files import AnyPath, read_range, size_of
from moe_ft.convert.model import Format, Item, SourceModel, read_ahead
from moe_ft.convert.tensors import GlobalTensor
from moe_ft.convert.verifying import FilePart, WrittenFile
from moe_ft.engine.memory.layout import encode_header
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.format.encoding import checksum
from moe_ft.format.packings import DTYPE_BYTES
from moe_ft.state.slices import DTYPES

INDEX_NAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as the library has it


@dataclass(frozen=True, slots=True)
class Description:
    """A tensor before it is there; its type has safetensors' name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def num_pieces(self) -> int:
        """Number of equal parts that are written one at a time."""
        return 1


class Stack(Description):
    """A tensor whose entries along the first dimension are written one at a time."""

    @property
    @override
    def num_pieces(self) -> int:
        return self.shape[0]


class NamedTensor(NamedTuple):
    """A tensor with a name, or its entry with a number along the first dimension."""

    name: str
    tensor: torch.Tensor
    number: int = 0


def write_tensors(
    path: Path,
    described: Mapping[str, Description],
    pieces: Iterable[NamedTensor],
    metadata: Mapping[str, str],
) -> list[FilePart]:
    """Write a file with the tensors that are described, in any order; return its parts.

    Each piece is written before the next one is asked for.
    """
    # As the library does: what needs the largest alignment comes first.
    names = sorted(described, key=lambda name: (-DTYPE_BYTES[described[name].dtype], name))
    declared: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets, end = {}, 0
    for name in names:
        each = described[name]
        offsets[name], end = end, end + each.num_bytes
        declared[name] = {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [offsets[name], end],
        }
    header = encode_header(declared)
    parts: dict[tuple[str, int], FilePart] = {}
    with path.open("wb") as file:
        file.write(header)
        for name, tensor, number in pieces:
            content, each = content_of(tensor), described[name]
            assert len(content) * each.num_pieces == each.num_bytes
            part = f"{name}[{number}]" if each.num_pieces > 1 else name
            parts[name, number] = FilePart(part, len(content), checksum(content))
            file.seek(len(header) + offsets[name] + number * len(content))
            file.write(content)
    listed = [parts[name, number] for name in names for number in range(described[name].num_pieces)]
    return [FilePart("the header", len(header), checksum(header)), *listed]


def content_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, in place if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


class _Described(msgspec.Struct, frozen=True):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DESCRIBED = msgspec.json.Decoder(_Described)


@dataclass(frozen=True, slots=True)
class StoredTensor(Description):
    """A tensor in a file, and where its bytes begin there."""

    path: AnyPath
    start: int

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor; `name` is for messages."""
        with _reading(f"{self.path}: {name}"):
            content = read_range(self.path, self.start, self.num_bytes)
            if len(content) != self.num_bytes:
                raise ValueError("it is cut short")
            if not content:
                return torch.empty(self.shape, dtype=DTYPES[self.dtype])
            return torch.frombuffer(content, dtype=DTYPES[self.dtype]).view(self.shape)

    def at(self, index: int) -> "StoredTensor":
        """Return the place of an entry along the first dimension."""
        shape = self.shape[1:]
        start = self.start + index * prod(shape) * DTYPE_BYTES[self.dtype]
        return StoredTensor(self.dtype, shape, self.path, start)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except CorruptStateError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptStateError(f"{what} cannot be read: {error}") from error


def list_tensors(path: AnyPath) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name."""
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


def _place(path: AnyPath, name: str, each: _Described, start: int) -> tuple[StoredTensor, int]:
    """Return the place of a tensor, and where it ends after the header."""
    first, last = each.data_offsets
    if each.dtype not in DTYPES:
        raise ValueError(f"{name} has the type {each.dtype}, which is not known")
    place = StoredTensor(each.dtype, each.shape, path, start + first)
    if min(first, *each.shape, 0) < 0 or last - first != place.num_bytes:
        raise ValueError(f"{name} has {last - first} bytes, and its shape {list(each.shape)}")
    return place, last


class SafetensorsSet(Format):
    """Writes the set."""

    @override
    def select(self, tensors: Sequence[GlobalTensor]) -> Sequence[GlobalTensor]:
        # A model of Hugging Face is such a set already.
        if self._model.kind == "hf":
            raise ConfigError(
                f"--to=safetensors: {self._model.place} is a set of safetensors. Convert to torch_dist."
            )
        return tensors

    @override
    def names_of(self, item: Item) -> Sequence[str]:
        return (self._name_of(item),)

    def _name_of(self, item: Item) -> str:
        name = f"{item.tensor.unit}/{item.tensor.name}"
        return name if item.kind == "weight" else f"{name}/{item.kind}"

    @override
    def write_shard(
        self, folder: Path, number: int, count: int, items: Sequence[Item]
    ) -> WrittenFile:
        described = {
            self._name_of(item): Description(item.dtype, item.tensor.shape) for item in items
        }
        pieces = (
            NamedTensor(self._name_of(item), tensor)
            for item, tensor in read_ahead(items, self._model)
        )
        return write_file(folder, number, count, described, pieces, self._model)

    @override
    def finish(self, folder: Path, shards: Sequence[Any], items: Sequence[Item]) -> None:
        write_index(folder, shards, facts_of(self._model, items))


def write_file(
    folder: Path,
    number: int,
    count: int,
    described: Mapping[str, Description],
    pieces: Iterable[NamedTensor],
    model: SourceModel,
) -> WrittenFile:
    """Write one file of a set, as `write_tensors` does, with the facts that `write_index` needs."""
    path = folder / f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    metadata = {"format": "pt", "iteration": str(model.iteration)}
    parts = write_tensors(path, described, pieces, metadata)
    num_bytes = sum(each.num_bytes for each in described.values())
    facts = {"file": path.name, "names": list(described), "bytes": num_bytes}
    return WrittenFile(path=path, parts=parts, facts=facts)


def write_index(folder: Path, shards: Sequence[Any], facts: Mapping[str, Any]) -> None:
    """Write the index of a set, with facts on its state."""
    index = {
        "metadata": {"total_size": sum(shard["bytes"] for shard in shards), "moe_ft": facts},
        "weight_map": {name: shard["file"] for shard in shards for name in shard["names"]},
    }
    path = folder / INDEX_NAME
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def facts_of(model: SourceModel, items: Sequence[Item]) -> Mapping[str, Any]:
    """Return where a state is from, the ages of units, and what was lost; if noted before, that."""
    if not model.facts:
        return {}
    ages: dict[str, int] = {}
    for item in items:
        unit, age = str(item.tensor.unit), item.tensor.iterations[item.kind]
        ages[unit] = min(age, ages.get(unit, age))
    return {"unit_iterations": ages, **model.facts}
