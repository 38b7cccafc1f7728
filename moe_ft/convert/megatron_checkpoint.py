"""The model of a `torch_dist` checkpoint of Megatron: its weights, and masters where they can be read.

The keys say whether layers have numbers or are stacked, and experts are stacked in their layer. No process
group is needed.
"""

import argparse
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, override

import torch
from megatron.core.dist_checkpointing.validation import INTEGRITY_FNAME
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from moe_ft.command_lines import as_flag
from moe_ft.convert.foreign_files import (
    AnyPath,
    place_in,
    read_json,
    read_range,
    read_whole,
    signature_of,
    size_of,
)
from moe_ft.convert.model import MegatronState, SourceModel
from moe_ft.convert.tensors import GlobalTensor, tensor_named
from moe_ft.convert.torch_metadata import load_object, read_metadata
from moe_ft.errors import ConfigError, CorruptStateError, MoeFtError
from moe_ft.state.slices import DTYPES, dtype_name

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_METADATA = ".metadata"
_COMMON, _LEGACY_COMMON = "common_state/shard_0_1", "common.pt"
_MASTERS = ("param", "fp32_param")
_NUMBERS: Mapping[str, tuple[Any, float]] = MappingProxyType(
    {
        **dict.fromkeys(("num_layers", "num_experts", "mtp_num_layers"), (int, 10**5)),
        **dict.fromkeys(
            (
                *("hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size", "num_attention_heads"),
                *("num_query_groups", "kv_channels", "moe_router_topk", "max_position_embeddings"),
                *("moe_shared_expert_intermediate_size", "vocab_size", "padded_vocab_size"),
            ),
            (int, 1 << 31),
        ),
        **dict.fromkeys(("norm_epsilon", "rotary_base"), (int | float, math.inf)),
        "moe_layer_freq": (int | str | list | tuple, 0),
    }
)
_STACKED_LAYERS = re.compile(r"decoder\.layers\.(?=[a-z])")
_STACK = ".experts.experts."
_HASH_BYTES = 8 << 20
_MOST_TRACKER_BYTES, _MOST_METADATA_BYTES, _MOST_COMMON_BYTES = 1 << 10, 1 << 30, 1 << 30
_MOST_PIECES = 10**7  # and tensors: files may be holes, so that their sizes limit nothing
_TRACKED = re.compile(r"[0-9]{1,12}|release")
# Weights that follow from masters in another way than by rounding them.
_FEW_BITS = ("fp8_param_gather", "fp4_param_gather", "fp8_param", "fp4_param")
_INCOMPARABLE = (
    " are kept in few bits, so that one cannot be checked by the other. Leave out --dtype for the weights in "
    "their own type."
)
_UNREADABLE = (
    "has them in buffers of its ranks (dp_reshardable). Save it with --dist-ckpt-optim-fully-reshardable and "
    "without --overlap-grad-reduce, or leave out --dtype for the weights in their own type."
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
class MegatronCheckpoint(SourceModel):
    """The model.

    Attributes:
        stored: by key.
        hashes: by name of a file, its SHA-256 if the checkpoint has them.
        problem: why masters cannot be read; empty if they can, or there are none.
    """

    folder: AnyPath
    problem: str
    stored: Mapping[str, _Stored] = field(repr=False)
    hashes: Mapping[str, str] = field(repr=False)
    kind: str = "torch_dist"
    _verified: set[str] = field(default_factory=set, repr=False)

    @override
    def tensors(self) -> Sequence[GlobalTensor]:
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

    @override
    def read(self, tensor: GlobalTensor, kind: str) -> torch.Tensor:
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
        parts = [
            (piece, ends)
            for piece in stored.pieces.get(tensor.index, ())
            if (ends := _overlap(start, extent, piece)) is not None
        ]
        num_read = sum(prod(last - first for first, last in ends) for _, ends in parts)
        if num_read != prod(extent):
            raise CorruptStateError(
                f"{self.folder}: pieces of {key} have {num_read} of {prod(extent)} elements"
            )
        found = torch.empty(extent, dtype=DTYPES[stored.dtype])
        for piece, ends in parts:
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
        return found.view(tensor.shape)

    def _read_piece(self, key: str, piece: _Piece) -> torch.Tensor:
        path = self.folder / piece.file
        self._verify(path)
        found: torch.Tensor = load_object(
            read_range(path, piece.start, piece.length), f"{path}: {key}"
        )
        return found

    def _verify(self, path: AnyPath) -> None:
        """Compare a file with its hash, before its first byte is used."""
        if path.name in self._verified or path.name not in self.hashes:
            return
        found, offset = hashlib.sha256(), 0
        while content := read_range(path, offset, _HASH_BYTES):
            found.update(content)
            offset += len(content)
        if found.hexdigest() != self.hashes[path.name]:
            raise CorruptStateError(f"{path} does not match its hash in {INTEGRITY_FNAME}")
        self._verified.add(path.name)

    @override
    def megatron_state(self, *, with_optimizer: bool, for_ep: int | None) -> MegatronState:
        raise ConfigError(
            f"--to=torch_dist: {self.folder} is a torch_dist checkpoint. Give it to --load of Megatron."
        )


def is_megatron_checkpoint(folder: AnyPath) -> bool:
    """Return whether a folder holds checkpoints of Megatron, or is one."""
    return (folder / TRACKER).is_file() or (folder / _METADATA).is_file()


def open_megatron_checkpoint(folder: AnyPath, iteration: int | None) -> MegatronCheckpoint:
    """Return the model of a checkpoint of Megatron, by default the one that its tracker names."""
    folder = _find(folder, iteration)
    try:
        metadata = read_metadata(
            read_whole(folder / _METADATA, _MOST_METADATA_BYTES), str(folder / _METADATA)
        )
        files = {
            name: size_of(place_in(folder, name, str(folder / _METADATA)))
            for name in sorted(
                {_text(each.relative_path) for each in metadata.storage_data.values()}
            )
        }
        common = _load_common(folder, metadata)
        content = dict(common.get("content_metadata") or {})
        stored = dict(_stored(metadata, folder, files))
        args, named = common.get("args"), int(common.get("iteration") or 0)
        hashes = _hashes(folder)
    except MoeFtError:
        raise
    except Exception as error:  # of many kinds, where anything may be in the place of anything
        raise CorruptStateError(
            f"{folder} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if content.get("singleton_local_shards"):
        raise ConfigError(
            f"{folder} has singleton_local_shards in its content metadata, which are not read. Load and save "
            "it with Megatron."
        )
    has_weights = any(not key.startswith("optimizer.") for key in stored)
    if not isinstance(args, argparse.Namespace) or not has_weights:
        raise ConfigError(f"{folder} must hold the arguments and weights of a model, and does not")
    return MegatronCheckpoint(
        place=str(folder),
        folder=folder,
        iteration=named,
        settings=dict(_settings(args, str(folder))),
        facts=facts if isinstance(facts := common.get("moe_ft"), dict) else {"iteration": named},
        signature=signature_of(folder / name for name in {_METADATA, *files}),
        problem=_problem_of_masters(args, str(content.get("distrib_optim_sharding_type"))),
        stored=stored,
        hashes=hashes,
    )


def _settings(args: argparse.Namespace, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings by flag, as conversions expect them: scalars and lists of them, else names of types.

    Raises:
        ConfigError: if one of which much is computed is no number, or too large.
    """
    for name, value in vars(args).items():
        flag = as_flag(str(name))
        kinds, most = _NUMBERS.get(name, (object, 0))
        if value is not None and (
            not isinstance(value, kinds) or (most and not 0 <= value <= most)
        ):
            found = value if isinstance(value, kinds) else f"a {type(value).__name__}"
            raise ConfigError(
                f"{place} has {flag}={found}, which no model has. Name another checkpoint."
            )
        values = value if isinstance(value, list | tuple) else [value]
        is_plain = all(isinstance(each, str | int | float | None) for each in values)
        yield flag, value if is_plain else type(value).__name__


def _problem_of_masters(args: argparse.Namespace, sharding: str) -> str:
    """Return why the masters cannot be taken; empty if they can, or there are none."""
    if sharding == "dp_reshardable":
        return _UNREADABLE
    for flag in _FEW_BITS:
        if getattr(args, flag, None):
            return f"has --{flag.replace('_', '-')}: its weights{_INCOMPARABLE}"
    kept = getattr(args, "main_params_dtype", torch.float32)
    if kept not in (torch.float32, "fp32") and getattr(
        args, "use_precision_aware_optimizer", False
    ):
        return f"has --main-params-dtype={kept}: its masters{_INCOMPARABLE}"
    return ""


def _hashes(folder: AnyPath) -> dict[str, str]:
    path = folder / INTEGRITY_FNAME
    files = read_json(path)["files"] if path.exists() else {}
    return {str(name): str(each) for name, each in files.items()}


def _load_common(folder: AnyPath, metadata: Metadata) -> dict[str, Any]:
    """Return what is no tensor."""
    path = folder / _LEGACY_COMMON
    if path.exists():
        found = load_object(read_whole(path, _MOST_COMMON_BYTES), str(path))
    else:
        place = metadata.storage_data[MetadataIndex(_COMMON)]
        path = folder / place.relative_path
        length = min(place.length, _MOST_COMMON_BYTES)
        (found,) = load_object(read_range(path, place.offset, length), f"{path}: {_COMMON}")
    return dict(found)


def _find(folder: AnyPath, iteration: int | None) -> AnyPath:
    """Return the folder of one checkpoint."""
    if iteration is None and (folder / _METADATA).is_file():
        return folder
    name = _tracked(folder / TRACKER) if iteration is None else str(iteration)
    found = folder / (name if name == _RELEASE else f"iter_{int(name):07d}")
    if not (found / _METADATA).is_file():
        given = "" if iteration is None else f"--iteration={iteration}: "
        raise ConfigError(
            f"{given}{found} must be a checkpoint in Megatron's format torch_dist, and has no {_METADATA}. "
            "Name another one, or save it with --ckpt-format torch_dist."
        )
    return found


def _tracked(path: AnyPath) -> str:
    """Return what the tracker names: an iteration or a release."""
    name = read_whole(path, _MOST_TRACKER_BYTES).decode(errors="replace").strip()
    if not _TRACKED.fullmatch(name):
        raise ConfigError(
            f"{path} holds {name!r:.60}, and must hold the number of an iteration, or {_RELEASE}. Name one "
            "with --iteration N."
        )
    return name


def _stored(
    metadata: Metadata, folder: AnyPath, files: Mapping[str, int]
) -> Iterator[tuple[str, _Stored]]:
    """Yield tensors and masters with the places of their pieces.

    Args:
        files: sizes by name: no tensor can have more elements than there are bytes.
    """
    wanted, num_named = tuple(f"optimizer.state.{each}." for each in _MASTERS), 0
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, info in metadata.storage_data.items():
        places.setdefault(_text(index.fqn), {})[tuple(map(int, index.offset or ()))] = info
    for key, each in metadata.state_dict_metadata.items():
        if not isinstance(each, TensorStorageMetadata):
            continue
        if key.startswith(("optimizer.", "chained_")) and not key.startswith(wanted):
            continue
        name = key.rpartition("param.")[2]
        num_axes = bool(_STACKED_LAYERS.match(name)) + (_STACK in name)
        pieces: dict[tuple[int, ...], list[_Piece]] = {}
        num_elements = 0
        for chunk in each.chunks:
            offset = tuple(map(int, chunk.offsets))
            info = _place_of(key, offset, places, folder)
            piece = _Piece(
                offset,
                tuple(map(int, chunk.sizes)),
                *(_text(info.relative_path), int(info.offset), int(info.length)),
            )
            num_elements += _check_piece(folder, key, piece, files)
            if (num_named := num_named + prod(piece.shape[:num_axes])) > _MOST_PIECES:
                raise CorruptStateError(
                    f"{folder} names more than {_MOST_PIECES} pieces of tensors"
                )
            ends = zip(piece.offset[:num_axes], piece.shape[:num_axes], strict=True)
            for index in product(*(range(first, first + num) for first, num in ends)):
                pieces.setdefault(index, []).append(piece)
        shape = tuple(map(int, each.size))
        if prod(shape[:num_axes]) > min(num_elements, _MOST_PIECES):
            raise CorruptStateError(
                f"{folder}: {key} has the shape {list(shape)}, and its pieces have {num_elements} elements"
            )
        yield key, _Stored(shape, dtype_name(each.properties.dtype), num_axes, pieces)


def _place_of(
    key: str,
    offset: tuple[int, ...],
    places: Mapping[str, Mapping[tuple[int, ...], Any]],
    folder: AnyPath,
) -> Any:
    """Return where a piece of a tensor is stored."""
    info = places.get(key, {}).get(offset)
    if info is None:
        raise CorruptStateError(f"{folder}: nothing says where {key} is from {offset}")
    if getattr(info, "transform_descriptors", None):
        raise ConfigError(f"{folder}: {key} is compressed, which is not read. Save it again.")
    return info


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CorruptStateError(f"a name in {_METADATA} is no text, but a {type(value).__name__}")
    return value


def _overlap(
    start: tuple[int, ...], extent: tuple[int, ...], piece: _Piece
) -> list[tuple[int, int]] | None:
    """Return the range of a block, by dimension, that a piece has; None if it has nothing of it."""
    ends = [
        (max(a, c), min(a + b, c + d))
        for a, b, c, d in zip(start, extent, piece.offset, piece.shape, strict=True)
    ]
    return None if any(first >= last for first, last in ends) else ends


def _check_piece(folder: AnyPath, key: str, piece: _Piece, files: Mapping[str, int]) -> int:
    """Return the number of elements of a piece; raise CorruptStateError if its file has no room for them."""
    num = prod(piece.shape)
    end = piece.start + max(piece.length, num)
    if (
        min(piece.start, piece.length, *piece.shape, *piece.offset, 0) < 0
        or end > files[piece.file]
    ):
        raise CorruptStateError(
            f"{folder / piece.file} has {files[piece.file]} bytes, and {_METADATA} says that {key} with the "
            f"shape {list(piece.shape)} is in {piece.length} of them from {piece.start} on"
        )
    return num
