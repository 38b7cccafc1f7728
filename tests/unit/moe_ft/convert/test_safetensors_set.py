"""Safetensors: the library reads what was written, and what it wrote is read, here and in a store."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from moe_ft.convert.conversion import ConversionRequest, convert
from moe_ft.convert.foreign_files import RemotePath
from moe_ft.convert.safetensors_set import (
    INDEX_NAME,
    Description,
    NamedTensor,
    Stack,
    list_tensors,
    write_tensors,
)
from moe_ft.convert.verifying import WrittenFile
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage
from moe_ft.format.index import Index
from moe_ft.format.records import ExpertProgress
from tests.unit.moe_ft.convert.flips import flip_written_bytes
from tests.unit.moe_ft.convert.models import known_tensors, persist_model


def converted(checkpoints: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """Convert to a set and return its index."""
    request = ConversionRequest(
        source=str(checkpoints), destination=str(folder), to="safetensors", **options
    )
    convert(request)
    found: dict[str, Any] = json.loads((folder / INDEX_NAME).read_text())
    return found


def tensor(folder: Path, index: dict[str, Any], name: str) -> torch.Tensor:
    with safe_open(folder / index["weight_map"][name], framework="pt") as opened:
        found: torch.Tensor = opened.get_tensor(name)
        return found


def test_all_tensors_are_in_the_files_that_the_index_names(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    index = converted(checkpoints, folder, shard_bytes=1000)
    files = sorted(each.name for each in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    names = {name.partition("/")[2]: name for name in index["weight_map"]}
    suffixes = {
        "param": "/master",
        "exp_avg": "/exp_avg",
        "exp_avg_sq": "/exp_avg_sq",
        "weight": "",
    }
    for (name, key), expected in known_tensors().items():
        assert torch.equal(tensor(folder, index, names[name + suffixes[key]]), expected)


def test_index_says_where_the_state_is_from(checkpoints: Path, tmp_path: Path) -> None:
    index = converted(checkpoints, tmp_path / "set", what="weights")
    facts = index["metadata"]["moe_ft"]
    assert (facts["iteration"], facts["job_id"], facts["lineage"]) == (4, "job", "run-a")
    assert facts["unit_iterations"]["layer.0.expert.1"] == 4
    assert "plt" not in facts
    assert index["metadata"]["total_size"] == 2 * (8 * 6 + 6 + 60 + 2 * 72) + 4 * 2


def test_ages_and_losses_of_experts_travel_with_them(tmp_path: Path) -> None:
    def change(index: Index) -> Index:
        expert = "layer.0.expert.1"
        older = msgspec.structs.replace(index.units[expert], iteration=2, routed_tokens=70)
        progress = ExpertProgress(
            cursor=0,
            k_snapshot=1,
            k_persist=1,
            least_k=1,
            interval=1,
            routed_tokens={"layer.0": (100, 100)},
            gaps={"layer.0": ((), ((10, 15),))},
            planned_tokens=1000,
        )
        units = {**index.units, expert: older}
        return msgspec.structs.replace(index, units=units, progress=progress)

    persist_model(Storage(str(tmp_path / "partial")), change=change)
    facts = converted(tmp_path / "partial", tmp_path / "set")["metadata"]["moe_ft"]
    assert facts["unit_iterations"]["layer.0.expert.1"] == 2
    assert facts["lost_tokens"] == {"layer.0": [0, 5]}
    assert facts["plt"] == pytest.approx(5 / 1000)


def test_file_that_reads_differently_is_an_error_that_names_the_tensor(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_written_bytes(monkeypatch)
    with pytest.raises(CorruptStateError, match=r"embedding/.* is not what was written"):
        converted(checkpoints, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    assert not (tmp_path / "set.incomplete").exists()


TENSORS = {
    "b": (torch.randn(3, 5), "F32"),
    "a": (torch.randn(7).bfloat16(), "BF16"),
    "scalar": (torch.tensor(2.0), "F32"),
    "empty": (torch.empty(0, 4), "F32"),
    "bits": (torch.randn(4, 6).half().t(), "F16"),
}
DESCRIBED = {name: Description(dtype, tuple(each.shape)) for name, (each, dtype) in TENSORS.items()}


def write(path: Path, names: list[str]) -> None:
    pieces = (NamedTensor(name, TENSORS[name][0]) for name in names)
    parts = write_tensors(path, DESCRIBED, pieces, {"format": "pt"})
    WrittenFile(path=path, parts=parts, facts={}).verify()


@pytest.mark.parametrize("seed", range(3))
def test_library_reads_every_tensor_in_whatever_order_they_came(tmp_path: Path, seed: int) -> None:
    names = [*TENSORS]
    random.Random(seed).shuffle(names)
    write(tmp_path / "file", names)
    found, ours = load_file(tmp_path / "file"), list_tensors(tmp_path / "file")
    assert set(found) == set(TENSORS)
    for name, (tensor, _) in TENSORS.items():
        for read in (found[name], ours[name].read(name)):
            assert read.dtype == tensor.dtype and torch.equal(read, tensor)
    with safe_open(tmp_path / "file", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_entries_of_a_stack_are_written_one_at_a_time(tmp_path: Path) -> None:
    whole, other = torch.randn(3, 2, 5), torch.randn(4)
    described = {"other": Description("F32", (4,)), "stack": Stack("F32", (3, 2, 5))}
    entries = (NamedTensor("stack", whole[number], number) for number in (2, 0, 1))
    path = tmp_path / "file"
    parts = write_tensors(path, described, [*entries, NamedTensor("other", other)], {})
    assert [each.name for each in parts[1:]] == ["other", *(f"stack[{at}]" for at in range(3))]
    WrittenFile(path=path, parts=parts, facts={}).verify()
    assert torch.equal(load_file(path)["stack"], whole)
    assert torch.equal(list_tensors(path)["stack"].at(1).read("stack"), whole[1])


KNOWN = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.empty(0, 3),
    "d": torch.tensor(7, dtype=torch.int64),
}
WHOLE = save(KNOWN, {"format": "pt"})


def remote(content: bytes) -> RemotePath:
    """Return an object with some content."""
    storage = Storage("memory://tensor_files")
    storage.write_atomically("x.safetensors", content)
    return RemotePath("x.safetensors", storage)


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
        place.read("d")
