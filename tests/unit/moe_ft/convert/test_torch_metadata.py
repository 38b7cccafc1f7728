"""Pickles of checkpoints name only the classes that torch and Megatron write there; nothing else runs."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from moe_ft.convert.torch_metadata import load_object, read_metadata
from moe_ft.errors import ConfigError, CorruptStateError


class Payload:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def saved(value: Any, **options: Any) -> bytes:
    """Return what `torch.save` writes."""
    content = io.BytesIO()
    torch.save(value, content, **options)
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


def test_class_that_others_use_is_not_changed() -> None:
    change = pickle.dumps((None, {"__doc__": "changed"}), 2)[2:-1]
    content = b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n" + change + b"b."
    with pytest.raises(ConfigError, match="x changes TensorProperties"):
        read_metadata(content, "x")
    assert TensorProperties.__doc__ != "changed"


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


@pytest.mark.parametrize("is_archive", [False, True])
def test_object_with_code_is_refused_and_not_run(is_archive: bool, tmp_path: Path) -> None:
    content = saved([Payload(tmp_path / "ran")], _use_new_zipfile_serialization=is_archive)
    with pytest.raises(ConfigError, match=r"^x names posix\.mkdir, and may name only"):
        load_object(content, "x")
    assert not (tmp_path / "ran").exists()


def test_object_that_is_cut_short_is_an_error() -> None:
    with pytest.raises(CorruptStateError, match="x cannot be read"):
        load_object(saved([1])[:-9], "x")
