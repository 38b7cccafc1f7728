"""The model of a `torch_dist` checkpoint of Megatron: its weights, and masters where they can be read.

The keys say whether layers have numbers or are stacked, and experts are stacked in their layer. No process
group is needed.
"""

import hashlib
import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from moe_ft.convert.destination import signature_of
from moe_ft.convert.model import MegatronState
from moe_ft.convert.remote_path import AnyPath
from moe_ft.convert.tensors import GlobalTensor, tensor_named
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.state.slices import DTYPES, dtype_name

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_METADATA = ".metadata"
_COMMON, _LEGACY_COMMON = "common_state/shard_0_1", "common.pt"
_MASTERS = ("param", "fp32_param")
_STACKED_LAYERS = re.compile(r"decoder\.layers\.(?=[a-z])")
_STACK = ".experts.experts."
_HASH_BYTES = 8 << 20
_UNREADABLE = (
    "has them in buffers of its ranks (dp_reshardable). Save it with --dist-ckpt-optim-fully-reshardable, "
    "or leave out --dtype for the weights in their own type."
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block of a tensor: where it belongs, and where it is stored."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the checkpoint, which may be a stack of layers, of experts, or of both.

    Attributes:
        num_axes: of the stack.
        pieces: by the index in the stack, those that overlap it.
    """

    shape: tuple[int, ...]
    dtype: str
    num_axes: int
    pieces: Mapping[tuple[int, ...], Sequence[_Piece]] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MegatronCheckpoint:
    """The model. Used by one thread.

    Attributes:
        stored: by key.
        hashes: by name of a file, its SHA-256 if the checkpoint has them.
        problem: why masters cannot be read; empty if they can, or there are none.
    """

    folder: AnyPath
    iteration: int
    settings: Mapping[str, Any] = field(repr=False)
    facts: Mapping[str, Any] = field(repr=False)
    signature: str
    problem: str
    stored: Mapping[str, _Stored] = field(repr=False)
    hashes: Mapping[str, str] = field(repr=False)
    kind: str = "torch_dist"
    _verified: set[str] = field(default_factory=set, repr=False)

    @property
    def place(self) -> str:
        """The folder or URL."""
        return str(self.folder)

    def tensors(self) -> Sequence[GlobalTensor]:
        """Return its tensors, by layer and expert."""
        return tuple(sorted(self._listed(), key=lambda each: (each.unit, each.name)))

    def _listed(self) -> Iterator[GlobalTensor]:
        for key, stored in self.stored.items():
            if key.startswith("optimizer."):
                continue
            has_master = any(f"optimizer.state.{each}.{key}" in self.stored for each in _MASTERS)
            has_master |= bool(self.problem) and stored.dtype != "F32"
            kinds = ("weight", "master") if has_master else ("weight",)
            is_stacked, num_axes = bool(_STACKED_LAYERS.match(key)), stored.num_axes
            for index in product(*map(range, stored.shape[:num_axes])):
                name = key
                if is_stacked:
                    name = _STACKED_LAYERS.sub(f"decoder.layers.{index[0]}.", name)
                if _STACK in key:
                    name = name.replace(_STACK, f"{_STACK}{index[-1]}.")
                tensor = tensor_named(name, stored.shape[num_axes:], stored.dtype, num_experts=0)
                yield replace(
                    tensor,
                    key=key,
                    stacked_shape=stored.shape,
                    index=index,
                    iterations=dict.fromkeys(kinds, self.iteration),
                )

    def read(self, tensor: GlobalTensor, kind: str) -> torch.Tensor:
        """Return a tensor, put together from its pieces."""
        key = tensor.key
        if kind == "master":
            if self.problem:
                raise ConfigError(
                    f"--dtype=fp32 needs the masters, and {self.folder} {self.problem}"
                )
            names = (f"optimizer.state.{each}.{key}" for each in _MASTERS)
            key = next(name for name in names if name in self.stored)
        stored = self.stored[key]
        start = (*tensor.index, *(0 for _ in tensor.shape))
        extent = (*(1 for _ in tensor.index), *tensor.shape)
        found = torch.empty(extent, dtype=DTYPES[stored.dtype])
        num_read = 0
        for piece in stored.pieces.get(tensor.index, ()):
            ends = [
                (max(a, c), min(a + b, c + d))
                for a, b, c, d in zip(start, extent, piece.offset, piece.shape, strict=True)
            ]
            if any(first >= last for first, last in ends):
                continue
            content = self._read_piece(key, piece)
            if content.shape != piece.shape or content.dtype != found.dtype:
                raise CorruptStateError(
                    f"{self.folder / piece.file}: a piece of {key} has another shape"
                )
            into, part = found, content
            for dim, (first, last) in enumerate(ends):
                into = into.narrow(dim, first - start[dim], last - first)
                part = part.narrow(dim, first - piece.offset[dim], last - first)
            into.copy_(part)
            num_read += into.numel()
        if num_read != found.numel():
            raise CorruptStateError(
                f"{self.folder}: pieces of {key} have {num_read} of {found.numel()} elements"
            )
        return found.view(tensor.shape)

    def _read_piece(self, key: str, piece: _Piece) -> torch.Tensor:
        path = self.folder / piece.file
        self._verify(path)
        with path.open("rb") as file:
            file.seek(piece.start)
            content = file.read(piece.length)
        try:
            found: torch.Tensor = torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:  # of many kinds, from a damaged archive
            raise CorruptStateError(f"{path}: {key} cannot be read: {error}") from error
        return found

    def _verify(self, path: AnyPath) -> None:
        """Compare a file with its hash, before its first byte is used."""
        if path.name in self._verified or path.name not in self.hashes:
            return
        found = hashlib.sha256()
        with path.open("rb") as file:
            while content := file.read(_HASH_BYTES):
                found.update(content)
        if found.hexdigest() != self.hashes[path.name]:
            raise CorruptStateError(f"{path} does not match its hash in {INTEGRITY_FNAME}")
        self._verified.add(path.name)

    def megatron_state(self, *, with_optimizer: bool, for_ep: int | None) -> MegatronState:
        """Refuse: it is a checkpoint of Megatron."""
        raise ConfigError(
            f"--to=torch_dist: {self.folder} is a torch_dist checkpoint. Give it to --load of Megatron."
        )


def is_megatron_checkpoint(folder: AnyPath) -> bool:
    """Return whether a folder holds checkpoints of Megatron, or is one."""
    return (folder / TRACKER).is_file() or (folder / _METADATA).is_file()


def open_megatron_checkpoint(folder: AnyPath, iteration: int | None) -> MegatronCheckpoint:
    """Return the model of a checkpoint of Megatron, by default the one that its tracker names.

    Raises:
        ConfigError: if it is none of `torch_dist`, or has a form that is not read.
        CorruptStateError: if it is damaged.
    """
    folder = _find(folder, iteration)
    try:
        metadata = pickle.loads((folder / _METADATA).read_bytes())
        common = _load_common(folder, metadata)
    except Exception as error:  # of many kinds, from a damaged pickle
        raise CorruptStateError(
            f"{folder} cannot be read: {type(error).__name__}: {error}"
        ) from error
    content = common.get("content_metadata") or {}
    if content.get("singleton_local_shards"):
        raise ConfigError(
            f"{folder} has singleton_local_shards in its content metadata, which are not read. Load and save "
            "it with Megatron."
        )
    stored = dict(_stored(metadata, folder))
    if "args" not in common or not any(not key.startswith("optimizer.") for key in stored):
        raise ConfigError(f"{folder} must hold the arguments and weights of a model, and does not")
    named = int(common.get("iteration") or 0)
    hashes = {}
    if (folder / INTEGRITY_FNAME).exists():
        hashes = json.loads((folder / INTEGRITY_FNAME).read_text(encoding="utf-8"))["files"]
    sharding = str(content.get("distrib_optim_sharding_type", ""))
    return MegatronCheckpoint(
        folder=folder,
        iteration=named,
        settings={
            "--" + name.replace("_", "-"): value for name, value in vars(common["args"]).items()
        },
        facts=common.get("moe_ft") or {"iteration": named},
        signature=signature_of(folder / name for name in {_METADATA, *_files_of(metadata)}),
        problem=_UNREADABLE if sharding == "dp_reshardable" else "",
        stored=stored,
        hashes=hashes,
    )


def _load_common(folder: AnyPath, metadata: Any) -> dict[str, Any]:
    """Return what is no tensor; Megatron reads it from folders of this machine alone."""
    if isinstance(folder, Path):
        found: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
        return found
    if (folder / _LEGACY_COMMON).is_file():
        return dict(_unpickle((folder / _LEGACY_COMMON).read_bytes()))
    place = metadata.storage_data[MetadataIndex(_COMMON)]
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return dict(_unpickle(file.read(place.length))[0])


def _unpickle(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def _find(folder: AnyPath, iteration: int | None) -> AnyPath:
    """Return the folder of one checkpoint."""
    if (folder / _METADATA).is_file() and iteration is None:
        return folder
    name = f"{iteration:07d}" if iteration is not None else (folder / TRACKER).read_text().strip()
    found = folder / (name if name == _RELEASE else f"iter_{int(name):07d}")
    if not (found / _METADATA).is_file():
        given = "" if iteration is None else f"--iteration={iteration}: "
        raise ConfigError(
            f"{given}{found} must be a checkpoint in Megatron's format torch_dist, and has no {_METADATA}. "
            "Name another one, or save it with --ckpt-format torch_dist."
        )
    return found


def _files_of(metadata: Any) -> set[str]:
    return {each.relative_path for each in metadata.storage_data.values()}


def _stored(metadata: Any, folder: AnyPath) -> Iterator[tuple[str, _Stored]]:
    """Yield tensors and masters with the places of their pieces."""
    wanted = tuple(f"optimizer.state.{each}." for each in _MASTERS)
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, info in metadata.storage_data.items():
        places.setdefault(index.fqn, {})[tuple(index.offset or ())] = info
    for key, each in metadata.state_dict_metadata.items():
        if not isinstance(each, TensorStorageMetadata):
            continue
        if key.startswith(("optimizer.", "chained_")) and not key.startswith(wanted):
            continue
        name = key.rpartition("param.")[2]
        num_axes = bool(_STACKED_LAYERS.match(name)) + (_STACK in name)
        pieces: dict[tuple[int, ...], list[_Piece]] = {}
        for chunk in each.chunks:
            info = places.get(key, {}).get(tuple(chunk.offsets))
            if info is None:
                raise CorruptStateError(
                    f"{folder}: nothing says where {key} is from {tuple(chunk.offsets)}"
                )
            if getattr(info, "transform_descriptors", None):
                raise ConfigError(
                    f"{folder}: {key} is compressed, which is not read. Save it again."
                )
            place = (info.relative_path, info.offset, info.length)
            piece = _Piece(tuple(chunk.offsets), tuple(chunk.sizes), *place)
            ends = zip(piece.offset[:num_axes], piece.shape[:num_axes], strict=True)
            for index in product(*(range(first, first + num) for first, num in ends)):
                pieces.setdefault(index, []).append(piece)
        yield key, _Stored(tuple(each.size), dtype_name(each.properties.dtype), num_axes, pieces)
