"""Pickles of checkpoints name only the classes that torch and Megatron write there; nothing else runs."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import WriteItemType

from moe_ft.convert.torch_metadata import load_object, read_metadata
from moe_ft.errors import ConfigError, CorruptStateError


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def saved(value: Any) -> bytes:
    """Return what `torch.save` writes."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_with_code_is_refused_by_name_and_not_run(protocol: int, tmp_path: Path) -> None:
    payload = Metadata({}, storage_data=Payload(tmp_path / "ran"))
    with pytest.raises(
        ConfigError, match=r"x names posix\.mkdir, and may name only the classes of"
    ):
        read_metadata(pickle.dumps(payload, protocol), "x")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["builtins\neval", "torch\nload", "torch.Size\n__init__"])
def test_function_of_an_allowed_module_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"names {name.replace(chr(10), '.')}, and"):
        read_metadata(f"c{name}\n.".encode(), "x")


@pytest.mark.parametrize(
    ("target", "shared"),
    [
        (b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n", TensorProperties),
        (b"ctorch.serialization\n_get_layout\n", torch.serialization._get_layout),
        (b"ctorch.distributed.checkpoint.planner\nWriteItemType\nK\x01\x85R", WriteItemType(1)),
    ],
    ids=["class", "function", "member"],
)
def test_object_that_others_use_is_not_changed(target: bytes, shared: Any) -> None:
    change = pickle.dumps((None, {"__doc__": "changed"}), 2)[2:-1]
    with pytest.raises(ConfigError, match="x changes a .* that others use"):
        read_metadata(target + change + b"b.", "x")
    assert shared.__doc__ != "changed"


# A tuple of two tuples, each of which is a tuple of two ..., 60 deep.
_NESTED = b"K\x01\x85" + b"".join(b"\x94h" + bytes([each]) + b"\x86" for each in range(60))
_INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81"


@pytest.mark.parametrize(
    "content",
    [
        b"}" + _NESTED + b"K\x01s.",
        b"}(" + _NESTED + b"K\x01u.",
        b"}" + _INDEX + b"}U\x06offset" + _NESTED + b"sbK\x01s.",
        b"ctorch.distributed.checkpoint.planner\nWriteItemType\n" + _NESTED + b"\x85R.",
        b"\x8f(" + _NESTED + b"\x90.",
    ],
    ids=["key", "one of several keys", "field of a key", "argument", "element of a set"],
)
def test_pickle_that_would_be_hashed_for_ever_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CorruptStateError, match=r"x (has a key or an argument|cannot be read)"):
        read_metadata(b"\x80\x04" + content, "x")
    archive = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved([1]))) as source, zipfile.ZipFile(archive, "w") as target:
        for name in source.namelist():
            is_pickle = name.endswith("data.pkl")
            target.writestr(name, b"\x80\x02" + content if is_pickle else source.read(name))
    with pytest.raises(
        (ConfigError, CorruptStateError), match=r"x (has a key|cannot be read|names)"
    ):
        load_object(archive.getvalue(), "x")


@pytest.mark.parametrize("kind", ["deflated", "one entry twice"])
def test_archive_that_takes_more_memory_than_it_has_bytes_is_refused(kind: str) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as target:
        if kind == "deflated":
            target.writestr("a/data/0", bytes(1 << 20), zipfile.ZIP_DEFLATED)
        else:
            target.writestr("a/data/0", bytes(1 << 20))
            target.filelist *= 2
    with pytest.raises(CorruptStateError, match="x is compressed, which torch never does"):
        load_object(content.getvalue(), "x")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        pickle.dumps(5),
        # What asks for terabytes: the index of a note, and the length of an array.
        b"\x80\x04Nr\xff\xff\xff\xff.",
        b"\x80\x05\x96" + (1 << 42).to_bytes(8, "little") + b".",
    ],
)
def test_metadata_that_is_damaged_is_an_error(content: bytes) -> None:
    with pytest.raises(CorruptStateError, match="x (cannot be read|holds no metadata)"):
        read_metadata(content, "x")


def test_object_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    content = saved([Payload(tmp_path / "ran")])
    with pytest.raises(ConfigError, match=r"^x names posix\.mkdir, and may name only"):
        load_object(content, "x")
    assert not (tmp_path / "ran").exists()


def test_object_that_is_cut_short_is_an_error() -> None:
    with pytest.raises(CorruptStateError, match="x cannot be read"):
        load_object(saved([1])[:-9], "x")
