"""The readers of torch and Megatron open a converted checkpoint and find what was in the source.

Training that continues from one is tests/distributed/test_convert.py.
"""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.common import load_common
from megatron.core.dist_checkpointing.validation import verify_integrity_manifest
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moe_ft.config.stock_defects import SHARED_RANDOM_STATE
from moe_ft.convert import torch_dist
from moe_ft.convert.conversion import ConversionRequest, convert
from moe_ft.errors import CorruptStateError
from tests.unit.moe_ft.convert.flips import flip_written_bytes
from tests.unit.moe_ft.convert.models import BIAS, ITERATION, LAYER, MODEL, OBJECT, known_tensors

KEYS = {"param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def converted(checkpoints: Path, folder: Path, **options: Any) -> Path:
    request = ConversionRequest(
        source=str(checkpoints), destination=str(folder), to="torch_dist", **options
    )
    convert(request)
    return folder


def test_one_random_state_for_all_expert_parallel_ranks_is_said(
    checkpoints: Path, tmp_path: Path
) -> None:
    for number, (for_ep, what, is_said) in enumerate(
        [(2, "all", True), (1, "all", False), (2, "weights", False)]
    ):
        folder = str(tmp_path / str(number))
        given = ConversionRequest(source=str(checkpoints), destination=folder, to="torch_dist")
        lines = convert(replace(given, for_ep=for_ep, what=what)).splitlines()
        assert (lines[-1] == SHARED_RANDOM_STATE) == is_said


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Load all tensors with torch alone."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in described.items()
        if isinstance(each, TensorStorageMetadata)
    }
    checkpoint.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


def test_torch_loads_every_tensor_with_experts_stacked(checkpoints: Path, tmp_path: Path) -> None:
    folder = converted(checkpoints, tmp_path / "out", shard_bytes=1000) / f"iter_{ITERATION:07d}"
    assert len(list(folder.glob("*.distcp"))) > 3
    found = loaded(folder)
    known = known_tensors()
    for each in MODEL:
        for key in ("weight", *KEYS):
            name = each.key if key == "weight" else f"optimizer.state.{key}.{each.key}"
            value = found[name] if each.expert < 0 else found[name][each.expert]
            assert torch.equal(value, known[each.name, key]), name
    assert torch.equal(found[f"{LAYER}.mlp.router.expert_bias"], BIAS)


def test_megatron_finds_its_common_state_objects_and_checksums(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = converted(checkpoints, tmp_path / "out")
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(ITERATION)
    checkpoint_folder = str(folder / f"iter_{ITERATION:07d}")
    assert dist_checkpointing.check_is_distributed_checkpoint(checkpoint_folder)
    verify_integrity_manifest(checkpoint_folder)
    state = dist_checkpointing.load_common_state_dict(checkpoint_folder)
    assert (state["iteration"], state["args"].num_layers) == (ITERATION, 1)
    assert state["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert state["moe_ft"]["unit_iterations"]["layer.0.expert.1"] == ITERATION
    keys = set(FileSystemReader(checkpoint_folder).read_metadata().state_dict_metadata)
    assert {OBJECT, "rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"} <= keys


def test_file_that_older_megatrons_load_says_what_the_object_of_newer_ones_says(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = converted(checkpoints, tmp_path / "out") / f"iter_{ITERATION:07d}"
    older = load_common(str(folder))
    (folder / "common.pt").unlink()
    assert dist_checkpointing.load_common_state_dict(str(folder)) == older


def test_weights_alone_are_a_release(checkpoints: Path, tmp_path: Path) -> None:
    folder = converted(checkpoints, tmp_path / "out", what="weights")
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "release"
    found = loaded(folder / "release")
    assert set(found) == {each.key for each in MODEL} | {f"{LAYER}.mlp.router.expert_bias"}
    assert dist_checkpointing.load_common_state_dict(str(folder / "release"))["args"].no_save_optim


def test_interrupted_conversion_continues_to_the_same_bytes(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = converted(checkpoints, tmp_path / "whole", shard_bytes=1000)
    write = torch_dist.TorchDist.write_shard
    done: list[int] = []

    def write_two(self: Any, folder: Path, number: int, *rest: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(number)
        return write(self, folder, number, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch_dist.TorchDist, "write_shard", write_two)
        converted(checkpoints, tmp_path / "out", shard_bytes=1000)
    assert not (tmp_path / "out").exists()
    first = tmp_path / f"out.incomplete/iter_{ITERATION:07d}/__0_0.distcp"
    before = first.stat().st_mtime_ns
    again = converted(checkpoints, tmp_path / "out", shard_bytes=1000)
    assert (again / first.parent.name / first.name).stat().st_mtime_ns == before
    expected, found = (loaded(each / f"iter_{ITERATION:07d}") for each in (whole, again))
    assert set(expected) == set(found)
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_tensor_that_reads_differently_is_an_error(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_written_bytes(monkeypatch)
    with pytest.raises(
        CorruptStateError, match=r"__0_0.distcp: optimizer.*embedding.* is not what was written"
    ):
        converted(checkpoints, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_metadata_holds_nothing_of_this_project(checkpoints: Path, tmp_path: Path) -> None:
    folder = converted(checkpoints, tmp_path / "out") / f"iter_{ITERATION:07d}"
    modules = set()

    class Watch(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            modules.add(module.partition(".")[0])
            return super().find_class(module, name)

    with (folder / ".metadata").open("rb") as file:
        Watch(file).load()
    assert "moe_ft" not in modules
