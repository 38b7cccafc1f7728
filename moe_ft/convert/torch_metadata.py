"""The metadata of torch's distributed checkpoints, which is a pickle, read without running code of others.

An unpickler calls whatever a file names. This one knows the classes that torch writes there and refuses all
other names; torch itself never opens the file. The objects of a checkpoint are archives of `torch.save`,
which torch reads with classes that Megatron calls safe.
"""

import io
import pathlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint import filesystem, metadata, planner

from moe_ft.errors import ConfigError, CorruptStateError

_REMEDY = (
    "It would run code that came with the checkpoint. Do not use this file; save the checkpoint again with "
    "Megatron's --ckpt-format torch_dist."
)
_UNSAFE = re.compile(r"GLOBAL (\S+)")  # as torch names what it does not load
_DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_ALLOWED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        **{
            (module.__name__, name): getattr(module, name)
            for module, names in (
                (
                    metadata,
                    (
                        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
                        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
                        "_MEM_FORMAT_ENCODING",
                    ),
                ),
                (planner, ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
                (filesystem, ("_StorageInfo", "_StoragePrefix")),
            )
            for name in names
        },
        # As versions of torch before 2.3 name them.
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): (
            metadata.TensorProperties
        ),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): (
            metadata._MEM_FORMAT_ENCODING
        ),
        **{("torch", str(each).removeprefix("torch.")): each for each in _DTYPES},
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): OrderedDict,
        **{
            (module, name): pathlib.PurePosixPath
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "PurePosixPath")
        },
    }
)


_InPython: Any = pickle._Unpickler  # whose opcodes have no types


class _Unpickler(_InPython):  # type: ignore[misc]
    """The one written in Python: in that in C, a number of a few bytes may ask for gigabytes of memory."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def __init__(self, content: bytes, place: str) -> None:
        super().__init__(io.BytesIO(content))
        self.place = place

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise ConfigError(
                f"{self.place} names {module}.{name}, and may name only the classes of torch's metadata. "
                f"{_REMEDY}"
            )
        return found

    def load_build(self) -> None:
        """Set the state of an object, but never that of a class, which others use too."""
        if isinstance(self.stack[-2], type):
            raise ConfigError(f"{self.place} changes {self.stack[-2].__name__}. {_REMEDY}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
    # Torch needs none of these: one makes as much room as a file says, the others find classes elsewhere.
    for _code in (pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        del dispatch[_code[0]]


def read_metadata(content: bytes, place: str) -> metadata.Metadata:
    """Return the metadata in the content of a file.

    Raises:
        ConfigError: if it names anything but the classes of metadata.
        CorruptStateError: if it is damaged, or holds something else.
    """
    try:
        found = _Unpickler(content, place).load()
    except ConfigError:
        raise
    except Exception as error:  # of many kinds, from a damaged pickle
        raise CorruptStateError(
            f"{place} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, metadata.Metadata):
        raise CorruptStateError(f"{place} holds no metadata of torch, but a {type(found).__name__}")
    return found


def load_object(content: memoryview | bytes, place: str) -> Any:
    """Return an object or tensor in an archive of `torch.save`.

    Raises:
        ConfigError: if it needs classes that are not known to be safe.
        CorruptStateError: if it is damaged.
    """
    register_safe_globals()
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # of many kinds, from a damaged archive
        if name := _UNSAFE.search(str(error)):
            raise ConfigError(
                f"{place} names {name[1]}, and may name only classes that Megatron calls safe. {_REMEDY}"
            ) from error
        # Of torch's text only the reason: it also says how to load the file without these limits.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise CorruptStateError(
            f"{place} cannot be read: {type(error).__name__}: {reason}"
        ) from error
