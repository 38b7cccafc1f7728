"""The metadata of torch's distributed checkpoints, which is a pickle, read without running code of others.

An unpickler calls whatever a file names. This one knows the classes that torch writes there and refuses all
other names; torch itself never opens the file. The objects of a checkpoint are archives of `torch.save`,
which torch reads with classes that Megatron calls safe.

Python does not keep hashes of tuples: a tuple of tuples, 60 deep, takes 250 bytes to write and years to hash.
So what is hashed, keys and the arguments of calls, must be flat.
"""

import io
import pathlib
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
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


def _is_flat(value: Any) -> bool:
    """Return whether a value is hashed in no more time than it took to read it."""
    if isinstance(value, metadata.MetadataIndex):
        return all(
            isinstance(each, tuple | _Scalar) and _is_flat(each) for each in vars(value).values()
        )
    if isinstance(value, tuple | list):
        return all(isinstance(each, _Scalar) for each in value)
    return isinstance(value, _Scalar)


_Scalar = str | int | float | bytes | None
_InPython: Any = pickle._Unpickler  # whose opcodes have no types


# By opcode, the part of the stack that it hashes: the arguments of a call, or keys.
_HASHED: Mapping[bytes, Callable[[list[Any]], Iterable[Any]]] = MappingProxyType(
    {
        **dict.fromkeys((pickle.REDUCE, pickle.NEWOBJ), lambda stack: stack[-1]),
        pickle.SETITEM: lambda stack: stack[-2:-1],
        pickle.SETITEMS: lambda stack: stack[::2],
    }
)
# Torch needs none: one makes as much room as a file says, three find classes elsewhere, the others hash.
_REFUSED = (
    *(pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEWOBJ_EX, pickle.INST),
    *(pickle.OBJ, pickle.DICT, pickle.ADDITEMS, pickle.FROZENSET),
)


class _Unpickler(_InPython):  # type: ignore[misc]
    """The one written in Python: in that in C, a number of a few bytes may ask for gigabytes of memory."""

    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)
    for _code in _REFUSED:
        del dispatch[_code[0]]
    for _code in (*_HASHED, pickle.BUILD, pickle.APPEND, pickle.APPENDS):
        dispatch[_code[0]] = lambda self, code=_code: self.check(code)

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

    def check(self, code: bytes) -> None:
        """Do what an opcode says, after a look at what it hashes."""
        if code in _HASHED and not all(map(_is_flat, _HASHED[code](self.stack))):
            raise CorruptStateError(
                f"{self.place} has a key or an argument that is nested in others"
            )
        self.act(code)

    def act(self, code: bytes) -> None:
        """Do it, but for changes of classes, functions and members of enums, which others use too."""
        target = self.stack[-2] if code == pickle.BUILD else None
        if code == pickle.BUILD and (isinstance(target, type) or not is_dataclass(target)):
            raise ConfigError(
                f"{self.place} changes a {type(target).__name__} that others use. {_REMEDY}"
            )
        _InPython.dispatch[code[0]](self)


class _Look(_Unpickler):
    """Makes nothing of a pickle that torch will read: only looks at what is to be hashed."""

    def find_class(self, module: str, name: str) -> Any:
        return None

    def persistent_load(self, pid: Any) -> Any:
        """Return nothing for a storage."""
        return None

    def act(self, code: bytes) -> None:
        if code in (pickle.SETITEMS, pickle.APPENDS):
            self.pop_mark()
        else:
            del self.stack[-2 if code == pickle.SETITEM else -1 :]
        if code in (pickle.REDUCE, pickle.NEWOBJ):
            self.stack[-1] = None  # for the function


def read_metadata(content: bytes, place: str) -> metadata.Metadata:
    """Return the metadata in the content of a file.

    Raises:
        ConfigError: if it names anything but the classes of metadata.
        CorruptStateError: if it is damaged, or holds something else.
    """
    try:
        found = _Unpickler(content, place).load()
    except (ConfigError, CorruptStateError):
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
    file = io.BytesIO(content)
    try:
        _check_archive(file, len(content), place)
        return torch.load(file, weights_only=True)
    except CorruptStateError:
        raise
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


def _check_archive(file: io.BytesIO, num_bytes: int, place: str) -> None:
    """Raise CorruptStateError unless an archive takes no more memory than bytes, and not for ever."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(each.compress_type for each in entries) or num_bytes < sum(
            each.file_size for each in entries
        ):
            raise CorruptStateError(
                f"{place} is compressed, which torch never does. Save it again."
            )
        for each in entries:
            if each.filename.endswith("data.pkl"):
                del each.CRC  # which torch can leave out
                _Look(archive.read(each), place).load()
    file.seek(0)
