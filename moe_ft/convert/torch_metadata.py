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
from collections.abc import Iterable, Mapping
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
        """Set the state of an object that is new, never that of a class, function or member of an enum."""
        if isinstance(self.stack[-2], type) or not is_dataclass(self.stack[-2]):
            raise ConfigError(
                f"{self.place} changes a {type(self.stack[-2]).__name__} that others use. {_REMEDY}"
            )
        super().load_build()

    def load_reduce(self) -> None:
        """Call one of the names."""
        self.check_flat(self.stack[-1])
        super().load_reduce()

    def load_newobj(self) -> None:
        """Make an object."""
        self.check_flat(self.stack[-1])
        super().load_newobj()

    def load_setitem(self) -> None:
        """Set a value by its key."""
        self.check_flat(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Set all values since the mark by the keys before them."""
        self.check_flat(self.stack[::2])
        super().load_setitems()

    def check_flat(self, values: Iterable[Any]) -> None:
        """Raise CorruptStateError unless values are soon hashed."""
        if not all(map(_is_flat, values)):
            raise CorruptStateError(
                f"{self.place} has a key or an argument that is nested in others"
            )

    for _code, _load in (
        (pickle.BUILD, load_build),
        (pickle.REDUCE, load_reduce),
        (pickle.NEWOBJ, load_newobj),
        (pickle.SETITEM, load_setitem),
        (pickle.SETITEMS, load_setitems),
    ):
        dispatch[_code[0]] = _load
    # Torch needs none of these: one makes as much room as a file says, three find classes elsewhere, the
    # others hash what they are given.
    for _code in (pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEWOBJ_EX):
        del dispatch[_code[0]]
    for _code in (pickle.INST, pickle.OBJ, pickle.DICT, pickle.ADDITEMS, pickle.FROZENSET):
        del dispatch[_code[0]]


class _Look(_Unpickler):
    """Makes nothing of a pickle that torch will read: only looks at what is to be hashed."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return None

    def persistent_load(self, pid: Any) -> Any:
        """Return nothing for a storage."""
        return None

    def load_call(self) -> None:
        """Look at arguments, which a result replaces."""
        self.check_flat(self.stack.pop())
        self.stack[-1] = None

    def load_item(self) -> None:
        """Look at a key."""
        self.check_flat(self.stack[-2:-1])
        del self.stack[-2:]

    def load_items(self) -> None:
        """Look at the keys since the mark."""
        self.check_flat(self.stack[::2])
        self.pop_mark()

    def load_last(self) -> None:
        """Pass over a state or an element."""
        self.stack.pop()

    def load_lasts(self) -> None:
        """Pass over elements."""
        self.pop_mark()

    for _code, _load in (
        (pickle.REDUCE, load_call),
        (pickle.NEWOBJ, load_call),
        (pickle.SETITEM, load_item),
        (pickle.SETITEMS, load_items),
        (pickle.BUILD, load_last),
        (pickle.APPEND, load_last),
        (pickle.APPENDS, load_lasts),
    ):
        dispatch[_code[0]] = _load


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
