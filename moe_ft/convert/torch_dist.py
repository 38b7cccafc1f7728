"""A `torch_dist` checkpoint of Megatron, which stock Megatron loads with --load in any layout.

Tensors are written with torch's own distributed checkpointing, a shard per file, and the metadata last.
Layers have numbers in their names and experts are stacked in their layer; the checkpoint says so, and its
loader follows. The optimizer is in the form that Megatron calls `fully_reshardable`. run_model.py has the
rest.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, override

import torch
import xxhash
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config as serialization_config

from moe_ft.convert.model import Format, Item, SourceModel, read_ahead
from moe_ft.convert.safetensors_set import facts_of
from moe_ft.convert.verifying import FilePart, WrittenFile
from moe_ft.format.encoding import convert_leaves
from moe_ft.state.slices import DTYPES

_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = "iter_{:07d}"
_RELEASE = "release"


class TorchDist(Format):
    """Writes the checkpoint."""

    def __init__(
        self, model: SourceModel, *, with_optimizer: bool, for_ep: int | None = None
    ) -> None:
        super().__init__(model)
        self._with_optimizer = with_optimizer
        self._state = model.megatron_state(with_optimizer=with_optimizer, for_ep=for_ep)
        self._keys = {"master": self._state.master}

    @override
    def names_of(self, item: Item) -> Sequence[str]:
        key = self._key(item)
        return (f"{key}[{','.join(map(str, item.tensor.index))}]" if item.tensor.index else key,)

    def _key(self, item: Item) -> str:
        if item.kind == "weight":
            return item.tensor.key
        return f"optimizer.state.{self._keys.get(item.kind, item.kind)}.{item.tensor.key}"

    def _folder(self, folder: Path) -> Path:
        """Return the folder of the checkpoint; weights alone are what Megatron calls a release."""
        name = _ITERATION.format(self._model.iteration) if self._with_optimizer else _RELEASE
        return folder / name

    @override
    def write_shard(
        self, folder: Path, number: int, count: int, items: Sequence[Item]
    ) -> WrittenFile:
        # Its facts are where its items are, and the checksum that Megatron wants.
        writer = FileSystemWriter(
            self._folder(folder), thread_count=1, per_thread_copy_ahead=0, sync_files=False
        )
        writer.fs = files = _HashedFiles()
        self._folder(folder).mkdir(exist_ok=True)
        requests = [_write_item(self._key(item), item) for item in items]
        plan = SavePlan(requests, storage_data=_StoragePrefix(f"__{number}_"))
        # The CRC-32 of an archive takes four times as long as all else, and torch.load does not check it.
        with serialization_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            results = writer.write_data(plan, _Reader(self._model, items)).wait()
        found, names = [], {}
        for result in results:
            place = result.storage_data
            names[place.offset] = result.index.fqn
            offset = list(result.index.offset or ())
            found.append(
                [result.index.fqn, offset, place.relative_path, place.offset, place.length]
            )
        (path,) = files.parts
        facts = {"file": path.name, "places": found}
        parts = files.parts_of(path, names)
        return WrittenFile(path=path, parts=parts, facts=facts, with_sha256=True)

    @override
    def finish(self, folder: Path, shards: Sequence[Any], items: Sequence[Item]) -> None:
        where = self._folder(folder)
        where.mkdir(exist_ok=True)
        facts = convert_leaves(facts_of(self._model, items), lambda value: value)
        common = {**self._state.common, "moe_ft": facts}
        # Megatron 0.18 reads this file, newer versions read it or the object.
        (where / COMMON_STATE_FNAME).write_bytes(_encode(common).getvalue())
        metadata: dict[str, Any] = _describe(self._key, items)
        writer = FileSystemWriter(where, thread_count=1, per_thread_copy_ahead=0)
        objects = self._objects(common)
        requests = [
            WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO) for key in objects
        ]
        plan = SavePlan(requests, storage_data=_StoragePrefix(f"__{len(shards)}_"))
        written = writer.write_data(plan, _Objects(objects)).wait()
        metadata |= {key: BytesStorageMetadata() for key in objects}
        results = [
            WriteResult(
                index=MetadataIndex(key, offset),
                size_in_bytes=length,
                storage_data=_StorageInfo(path, start, length),
            )
            for shard in shards
            for key, offset, path, start, length in shard["places"]
        ]
        writer.finish(Metadata(metadata, planner_data={}), [results, list(written)])
        save_config(CheckpointingConfig("torch_dist", 1), str(where))
        _save_integrity(where, {shard["file"]: shard["sha256"] for shard in shards})
        name = str(self._model.iteration) if self._with_optimizer else _RELEASE
        (folder / _TRACKER).write_text(name, encoding="utf-8")

    def _objects(self, common: Mapping[str, Any]) -> dict[str, io.BytesIO]:
        """Return the objects of the checkpoint by key, encoded as Megatron does."""
        found = [ShardedObject("common_state", common, (1,), (0,))]
        found += [
            ShardedObject("rng_state", values, sizes, place)
            for place, sizes, values in self._state.rng
        ]
        encoded = {each.unique_key: _encode([each.data]) for each in found}
        # Modules take "nothing" for their FP8 state and make it again.
        return encoded | {key: _encode([None]) for key in self._state.modules}


def _encode(value: Any) -> io.BytesIO:
    encoded = io.BytesIO()
    torch.save(value, encoded)
    return encoded


def _save_integrity(where: Path, known: Mapping[str, str]) -> None:
    """Write what `save_integrity_manifest` of Megatron does; `known` are the checksums of shards by file."""
    sums = dict(known)
    for path in where.iterdir():
        if path.name not in sums:
            sums[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = {"algorithm": "sha256", "files": dict(sorted(sums.items()))}
    (where / INTEGRITY_FNAME).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


class _HashedFiles(FileSystem):
    """Files that torch's writer writes, with checksums of the parts of them.

    A part ends where the writer asks for its position, as it does after each tensor.

    Attributes:
        parts: by file, position, length and checksum of each part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[Path, list[tuple[int, int, str]]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file to write."""
        with super().create_stream(path, mode) as stream:
            hashed = _HashedStream(stream)
            yield hashed
            hashed.tell()
            self.parts[Path(path)] = hashed.parts

    def parts_of(self, path: Path, names: Mapping[int, str]) -> list[FilePart]:
        """Return the parts of a file; `names` are those of parts by position."""
        found, name = [], "its beginning"
        for start, num_bytes, checksum in self.parts[path]:
            name = names.get(start, name)
            found.append(FilePart(name, num_bytes, checksum))
        return found


class _HashedStream:
    """A file with the methods that torch's writer calls."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.parts: list[tuple[int, int, str]] = []
        self._start = self._end = 0
        self._hash = xxhash.xxh3_64()

    def tell(self) -> int:
        """Return the position, where another part begins."""
        if self._end > self._start:
            self.parts.append((self._start, self._end - self._start, self._hash.hexdigest()))
            self._start = self._end
            self._hash = xxhash.xxh3_64()
        return self._end

    def write(self, content: Any) -> int:
        """Write and remember."""
        self._hash.update(content)
        self._file.write(content)
        self._end += memoryview(content).nbytes
        return memoryview(content).nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)  # flush, fileno


class _Reader(DefaultSavePlanner):
    """Gives torch's writer the tensors of a shard when it comes to them."""

    def __init__(self, model: SourceModel, items: Sequence[Item]) -> None:
        super().__init__()
        self._tensors = read_ahead(items, model)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        item, tensor = next(self._tensors)
        assert write_item.index.offset == _chunk(item).offsets  # torch keeps the order
        return tensor.view((1,) * len(item.tensor.index) + item.tensor.shape)


class _Objects(DefaultSavePlanner):
    """Gives torch's writer objects that are encoded already."""

    def __init__(self, objects: Mapping[str, io.BytesIO]) -> None:
        super().__init__()
        self._objects = objects

    def resolve_data(self, write_item: WriteItem) -> io.BytesIO:
        return self._objects[write_item.index.fqn]


def _chunk(item: Item) -> ChunkStorageMetadata:
    tensor = item.tensor
    return ChunkStorageMetadata(
        offsets=torch.Size((*tensor.index, *(0 for _ in tensor.shape))),
        sizes=torch.Size((1,) * len(tensor.index) + tensor.shape),
    )


def _described(item: Item) -> tuple[TensorProperties, torch.Size]:
    return TensorProperties(dtype=DTYPES[item.dtype]), torch.Size(item.tensor.stacked_shape)


def _write_item(key: str, item: Item) -> WriteItem:
    chunk, (properties, size) = _chunk(item), _described(item)
    data = TensorWriteData(chunk=chunk, properties=properties, size=size)
    index = MetadataIndex(key, chunk.offsets)
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _describe(key_of: Any, items: Sequence[Item]) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of all tensors by key."""
    found: dict[str, TensorStorageMetadata] = {}
    for item in items:
        described = TensorStorageMetadata(*_described(item), chunks=[])
        found.setdefault(key_of(item), described).chunks.append(_chunk(item))
    return found
