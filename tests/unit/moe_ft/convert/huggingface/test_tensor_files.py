"""Safetensors of a store are read as the library reads those of this machine."""

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from moe_ft.convert.huggingface.tensor_files import list_tensors, read_tensor
from moe_ft.convert.remote_path import RemotePath
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.empty(0, 3),
    "d": torch.tensor(7, dtype=torch.int64),
}
WHOLE = save(TENSORS, {"format": "pt"})


def remote(content: bytes) -> RemotePath:
    """Return an object with some content."""
    storage = Storage("memory://tensor_files")
    storage.write_atomically("x.safetensors", content)
    return RemotePath("x.safetensors", storage)


def test_both_have_the_same_tensors(tmp_path: Path) -> None:
    local, far = tmp_path / "x.safetensors", remote(WHOLE)
    save_file(TENSORS, local)
    for path in (local, far):
        listed = list_tensors(path)
        found = {name: read_tensor(name, place) for name, place in listed.items()}
        assert found.keys() == TENSORS.keys()
        for name, each in TENSORS.items():
            assert torch.equal(found[name], each)
            assert (listed[name].shape, found[name].dtype) == (each.shape, each.dtype)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WHOLE[:-1], r"it has \d+ bytes, and its header says"),
        (WHOLE[:5], "cannot be read"),
        (b"", "cannot be read"),
        (struct.pack("<Q", 1 << 60) + WHOLE, f"its header has {1 << 60} bytes"),
        (struct.pack("<Q", 2) + b"[]", "cannot be read"),
        (WHOLE.replace(b"[2,3]", b"[2,4]"), r"a has 24 bytes, and its shape \[2, 4\]"),
        (WHOLE.replace(b'"F32"', b'"F99"'), "cannot be read"),
    ],
)
def test_object_that_is_damaged_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(CorruptStateError, match=message):
        list_tensors(remote(content))


def test_object_that_is_cut_short_later_is_refused() -> None:
    place = list_tensors(remote(WHOLE))["d"]
    remote(WHOLE[: place.start])
    with pytest.raises(CorruptStateError, match=r"x.safetensors: d cannot be read"):
        read_tensor("d", place)
