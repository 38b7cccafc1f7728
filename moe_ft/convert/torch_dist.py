"""A `torch_dist` checkpoint of Megatron, which stock Megatron loads with --load in any layout.

Tensors are written with torch's own distributed checkpointing, a shard per file, and the metadata last.
Layers have numbers in their names and experts are stacked in their layer; the checkpoint says so, and its
loader follows. The optimizer is in the form that Megatron calls `fully_reshardable`. common_state.py has the
rest.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo, _StoragePrefix
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

from moe_ft.convert.items import Item
from moe_ft.convert.model import Model
from moe_ft.convert.safetensors_set import checksum_of, facts_of
from moe_ft.convert.tensors import GlobalTensor
from moe_ft.errors import CorruptStateError
from moe_ft.format.json_values import convert_leaves
from moe_ft.state.slices import DTYPES

_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = "iter_{:07d}"
_RELEASE = "release"


class TorchDist:
    """Writes the checkpoint."""

    def __init__(self, model: Model, *, with_optimizer: bool, for_ep: int | None = None) -> None:
        self._model, self._with_optimizer = model, with_optimizer
        self._state = model.megatron_state(with_optimizer=with_optimizer, for_ep=for_ep)
        self._keys = {"master": self._state.master}

    def select(self, tensors: Sequence[GlobalTensor]) -> Sequence[GlobalTensor]:
        """Return all tensors."""
        return tensors

    def name_of(self, item: Item) -> str:
        """Return the key of an item, with the index of an expert in its stack."""
        key = self._key(item)
        return f"{key}[{','.join(map(str, item.tensor.index))}]" if item.tensor.index else key

    def _key(self, item: Item) -> str:
        if item.kind == "weight":
            return item.tensor.key
        return f"optimizer.state.{self._keys.get(item.kind, item.kind)}.{item.tensor.key}"

    def _folder(self, folder: Path) -> Path:
        """Return the folder of the checkpoint; weights alone are what Megatron calls a release."""
        name = _ITERATION.format(self._model.iteration) if self._with_optimizer else _RELEASE
        return folder / name

    def write_shard(self, folder: Path, number: int, count: int, items: Sequence[Item]) -> Any:
        """Write and verify one file; return where its items are."""
        writer = FileSystemWriter(self._folder(folder), thread_count=1, per_thread_copy_ahead=0)
        self._folder(folder).mkdir(exist_ok=True)
        requests = {_write_item(self._key(item), item).index: item for item in items}
        planner = _Reader(self._model, requests)
        plan = SavePlan(
            [_write_item(self._key(item), item) for item in items],
            storage_data=_StoragePrefix(f"__{number}_"),
        )
        results = writer.write_data(plan, planner).wait()
        found = []
        for result in results:
            place = result.storage_data
            self._verify(folder, place, planner.sums[result.index], result.index.fqn)
            offset = list(result.index.offset or ())
            found.append(
                [result.index.fqn, offset, place.relative_path, place.offset, place.length]
            )
        return found

    def _verify(self, folder: Path, place: _StorageInfo, checksum: str, name: str) -> None:
        path = self._folder(folder) / place.relative_path
        with path.open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        if checksum_of(torch.load(content, weights_only=True)) != checksum:
            raise CorruptStateError(f"{path}: {name} is not what was written. Is the disk sound?")

    def finish(self, folder: Path, shards: Sequence[Any], items: Sequence[Item]) -> None:
        """Write what is no tensor, then the metadata and what makes Megatron find it."""
        where = self._folder(folder)
        where.mkdir(exist_ok=True)
        metadata: dict[str, Any] = _describe(self._key, items)
        writer = FileSystemWriter(where, thread_count=1, per_thread_copy_ahead=0)
        objects = self._objects(items)
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
            for key, offset, path, start, length in shard
        ]
        writer.finish(Metadata(metadata, planner_data={}), [results, list(written)])
        save_config(CheckpointingConfig("torch_dist", 1), str(where))
        save_integrity_manifest(str(where))
        name = str(self._model.iteration) if self._with_optimizer else _RELEASE
        (folder / _TRACKER).write_text(name, encoding="utf-8")

    def _objects(self, items: Sequence[Item]) -> dict[str, io.BytesIO]:
        """Return the objects of the checkpoint by key, encoded as Megatron does."""
        facts = convert_leaves(facts_of(self._model, items), lambda value: value)
        common = {**self._state.common, "moe_ft": facts}
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


class _Reader(DefaultSavePlanner):
    """Gives torch's writer the tensors of a shard when it comes to them, and remembers their checksums."""

    def __init__(self, model: Model, items: Mapping[MetadataIndex, Item]) -> None:
        super().__init__()
        self._model, self._items = model, items
        self.sums: dict[MetadataIndex, str] = {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        item = self._items[write_item.index]
        tensor = item.read(self._model)
        self.sums[write_item.index] = checksum_of(tensor)
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


def _write_item(key: str, item: Item) -> WriteItem:
    chunk = _chunk(item)
    return WriteItem(
        index=MetadataIndex(key, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=DTYPES[item.dtype]),
            size=torch.Size(item.tensor.stacked_shape),
        ),
    )


def _describe(key_of: Any, items: Sequence[Item]) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of all tensors by key."""
    found: dict[str, TensorStorageMetadata] = {}
    for item in items:
        described = found.setdefault(
            key_of(item),
            TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[item.dtype]),
                size=torch.Size(item.tensor.stacked_shape),
                chunks=[],
            ),
        )
        described.chunks.append(_chunk(item))
    return found
