"""One file: the library reads what was written, whatever the order and the types."""

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moe_ft.convert.safetensors_file import Description, content_of, write_tensors
from moe_ft.convert.verifying import WrittenFile
from moe_ft.errors import CorruptStateError
from tests.unit.moe_ft.convert.flips import flip_written_bytes

TENSORS = {
    "b": (torch.randn(3, 5), "F32"),
    "a": (torch.randn(7).bfloat16(), "BF16"),
    "scalar": (torch.tensor(2.0), "F32"),
    "empty": (torch.empty(0, 4), "F32"),
    "bits": (torch.randn(4, 6).half().t(), "F16"),
}
DESCRIBED = {name: Description(dtype, tuple(each.shape)) for name, (each, dtype) in TENSORS.items()}


def write(path: Path, names: list[str]) -> None:
    tensors = ((name, TENSORS[name][0]) for name in names)
    parts = write_tensors(path, DESCRIBED, tensors, {"format": "pt"})
    WrittenFile(path=path, parts=parts, facts={}).verify()


@pytest.mark.parametrize("seed", range(3))
def test_library_reads_every_tensor_in_whatever_order_they_came(tmp_path: Path, seed: int) -> None:
    names = [*TENSORS]
    random.Random(seed).shuffle(names)
    write(tmp_path / "file", names)
    found = load_file(tmp_path / "file")
    assert set(found) == set(TENSORS)
    for name, (tensor, _) in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(tmp_path / "file", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_tensor_that_reads_differently_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_written_bytes(monkeypatch)
    with pytest.raises(CorruptStateError, match="file: b is not what was written"):
        write(tmp_path / "file", [*TENSORS])


def test_contents_are_bytes_of_any_type_and_order() -> None:
    assert bytes(content_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8).t())) == b"\1\3\2\4"
