"""The set of safetensors files is what the library itself reads, with an index of everything."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from moe_ft.convert.conversion import Request, convert
from moe_ft.convert.safetensors_set import INDEX_NAME, checksum_of
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage
from moe_ft.format.index import Index
from moe_ft.format.records import ExpertProgress
from tests.unit.moe_ft.convert.flips import flip_written_bytes
from tests.unit.moe_ft.convert.models import known_tensors, persist_model


def converted(checkpoints: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """Convert to a set and return its index."""
    request = Request(source=str(checkpoints), destination=str(folder), to="safetensors", **options)
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


def test_checksum_covers_the_bits_of_any_type() -> None:
    value = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert checksum_of(value) == checksum_of(value.clone())
    assert checksum_of(value) != checksum_of(-value)
    assert checksum_of(torch.tensor(1.0)) == checksum_of(torch.tensor([1.0]))
