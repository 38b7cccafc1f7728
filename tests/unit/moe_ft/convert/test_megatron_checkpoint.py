"""Checkpoints of Megatron as sources, written here with torch alone.

Those that Megatron itself has saved are read in tests/distributed/test_convert.py.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from safetensors.torch import load_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from moe_ft.convert.conversion import ConversionRequest, convert
from moe_ft.convert.megatron_checkpoint import open_megatron_checkpoint
from moe_ft.errors import ConfigError, CorruptStateError

LAYERS, EXPERTS = 2, 3
FC1 = "mlp.experts.experts.linear_fc1.weight"
PROJECTION = "self_attention.linear_proj.weight"
TENSORS = {
    "decoder.final_layernorm.weight": torch.rand(4),
    f"decoder.layers.{FC1}": torch.rand(LAYERS, EXPERTS, 6, 4),
    f"decoder.layers.{PROJECTION}": torch.rand(LAYERS, 4, 4),
}


def numbered() -> dict[str, torch.Tensor]:
    """Return the same tensors with numbers of layers in their names."""
    found = {}
    for key, value in TENSORS.items():
        if ".layers." not in key:
            found[key] = value
            continue
        for layer in range(LAYERS):
            found[key.replace(".layers.", f".layers.{layer}.")] = value[layer]
    return found


def save(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    content: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of iteration 3; return its folder."""
    args = Namespace(num_layers=LAYERS, **(arguments or {}))
    common = {"args": args, "iteration": 3, "content_metadata": content}
    state = {**tensors, "common_state/shard_0_1": [common], "rng_state/shard_0.0_1.1": [0]}
    checkpoint.save(
        state,
        checkpoint_id=folder / "iter_0000003",
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    save_config(CheckpointingConfig("torch_dist", 1), str(folder / "iter_0000003"))
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


@pytest.mark.parametrize("tensors", [TENSORS, numbered()], ids=["stacked", "numbered"])
def test_layers_and_experts_are_tensors_of_their_own(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = open_megatron_checkpoint(save(tmp_path, tensors), None)
    found = {each.name: each for each in model.tensors()}
    assert len(found) == 1 + LAYERS * (EXPERTS + 1)
    expert = found["decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight"]
    assert (str(expert.unit), expert.iterations) == ("layer.1.expert.2", {"weight": 3})
    assert torch.equal(model.read(expert, "weight"), TENSORS[f"decoder.layers.{FC1}"][1, 2])
    whole = found[f"decoder.layers.0.{PROJECTION}"]
    assert torch.equal(model.read(whole, "weight"), TENSORS[f"decoder.layers.{PROJECTION}"][0])


def test_settings_are_the_arguments(tmp_path: Path) -> None:
    model = open_megatron_checkpoint(save(tmp_path, TENSORS), 3)
    assert model.settings == {"--num-layers": LAYERS}
    assert (model.iteration, model.facts) == (3, {"iteration": 3})


NORM = "decoder.final_layernorm.weight"
MASTER = torch.rand(4)


def with_master(
    weight: torch.Tensor, master: torch.Tensor, name: str = "param"
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with one weight and its master."""
    return {NORM: weight, f"optimizer.state.{name}.{NORM}": master}


def converted(source: Path, dtype: str | None = "fp32") -> torch.Tensor:
    """Convert a checkpoint with one weight to safetensors; return it."""
    folder = source.parent / "out"
    convert(
        ConversionRequest(
            source=str(source), destination=str(folder), to="safetensors", dtype=dtype
        )
    )
    (found,) = load_file(folder / "model-00001-of-00001.safetensors").items()
    assert found[0] == f"final-norm/{NORM}"
    return found[1]


@pytest.mark.parametrize("name", ["param", "fp32_param"])
def test_masters_are_read_in_fp32(name: str, tmp_path: Path) -> None:
    tensors = with_master(MASTER.bfloat16(), MASTER, name)
    source = save(tmp_path / "src", tensors | {"optimizer.state.exp_avg." + NORM: MASTER})
    assert torch.equal(converted(source), MASTER)


def test_weights_that_have_all_bits_are_taken_and_not_their_masters(tmp_path: Path) -> None:
    source = save(tmp_path / "src", with_master(MASTER, MASTER + 1))
    assert torch.equal(converted(source), MASTER)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_master_that_is_not_its_weight_is_refused_by_name(to: torch.dtype, tmp_path: Path) -> None:
    master = torch.tensor([1.0, 1e-30, -0.0, 3.0])
    weight = master.to(to, copy=True)
    weight[2], weight[3] = 0.0, 3.01
    source = save(tmp_path / "src", with_master(weight, master))
    wanted = (
        f"the fp32 master of {NORM} is not its weight, in 2 of 4 elements .*"
        "--dist-ckpt-optim-fully-reshardable and --overlap-grad-reduce.*leave out --dtype fp32"
    )
    with pytest.raises(CorruptStateError, match=wanted):
        converted(source)
    assert not list(tmp_path.glob("out*"))
    assert torch.equal(converted(source, None), weight)


def test_numbers_that_are_none_are_the_same_whatever_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, 0x3F800000], dtype=torch.int32)
    weight = torch.tensor([0x7FC0, -1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    converted(save(tmp_path / "src", with_master(weight, bits.view(torch.float32))))


@pytest.mark.parametrize(
    ("settings", "content", "message"),
    [
        ({"fp8_param_gather": True}, {}, "has --fp8-param-gather: its weights are kept in few"),
        (
            {"use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
            {},
            "has --main-params-dtype=torch.float16: its masters are kept in few bits",
        ),
        ({}, {"distrib_optim_sharding_type": "dp_reshardable"}, "fully-reshardable"),
    ],
)
def test_masters_that_cannot_be_read_or_checked_are_refused(
    settings: dict[str, Any], content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tensors = with_master(MASTER.bfloat16(), MASTER)
    source = save(tmp_path / "src", tensors, content, arguments=settings)
    with pytest.raises(ConfigError, match=f"--dtype=fp32 needs the masters, and .*{message}"):
        converted(source)
    assert not list(tmp_path.glob("out*"))


def test_megatron_needs_no_checkpoint_of_its_own(tmp_path: Path) -> None:
    source = save(tmp_path / "src", TENSORS)
    request = ConversionRequest(
        source=str(source), destination=str(tmp_path / "out"), to="torch_dist"
    )
    with pytest.raises(ConfigError, match="--to=torch_dist: .* is a torch_dist checkpoint"):
        convert(request)


def test_iteration_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--iteration=4: .*iter_0000004 must be a checkpoint in"):
        open_megatron_checkpoint(save(tmp_path, TENSORS), 4)


def test_forms_that_are_not_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has singleton_local_shards in its content metadata"):
        open_megatron_checkpoint(save(tmp_path / "a", TENSORS, {"singleton_local_shards": True}), 3)
    with pytest.raises(ConfigError, match="must hold the arguments and weights of a model"):
        open_megatron_checkpoint(save(tmp_path / "b", {}), None)


def test_file_that_is_cut_short_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    folder = save(tmp_path, TENSORS) / "iter_0000003"
    model = open_megatron_checkpoint(folder, None)
    (path,) = folder.glob("*.distcp")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 4])
    with pytest.raises(CorruptStateError, match=r"\.distcp: decoder.* cannot be read"):
        [model.read(each, "weight") for each in model.tensors()]


def test_byte_that_was_changed_is_found_by_the_hashes(tmp_path: Path) -> None:
    folder = save(tmp_path, TENSORS) / "iter_0000003"
    save_integrity_manifest(str(folder))
    assert json.loads((folder / "integrity.json").read_text())["algorithm"] == "sha256"
    (path,) = folder.glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    model = open_megatron_checkpoint(folder, None)
    with pytest.raises(CorruptStateError, match="does not match its hash in integrity.json"):
        model.read(model.tensors()[0], "weight")
