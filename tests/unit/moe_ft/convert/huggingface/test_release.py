"""Models of Hugging Face as sources: what is read, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_ft.cli import main
from moe_ft.convert.conversion import ConversionRequest, convert
from moe_ft.convert.huggingface.release import open_release
from moe_ft.convert.model import MegatronState
from moe_ft.errors import ConfigError, CorruptStateError
from tests.unit.moe_ft.convert.huggingface.round_trip import tensors_of

INDEX = "model.safetensors.index.json"
NORM = "model.layers.1.post_attention_layernorm.weight"
GATE = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
UP = "model.layers.0.block_sparse_moe.experts.2.w3.weight"


def change_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; a key that becomes `...` is removed."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: each for key, each in config.items() if each is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder, which gets one file without an index."""
    tensors = tensors_of(folder)
    change(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


def test_expert_is_joined_and_has_its_place_in_the_stack(saved: Path) -> None:
    release = open_release(saved)
    name = "decoder.layers.0.mlp.experts.experts.2.linear_fc1.weight"
    (expert,) = (each for each in release.tensors() if each.name == name)
    assert (str(expert.unit), expert.stacked_shape) == ("layer.0.expert.2", (4, 80, 32))
    tensors = tensors_of(saved)
    assert torch.equal(release.read(expert, "weight"), torch.cat([tensors[GATE], tensors[UP]]))


def test_norm_before_experts_has_both_names_of_megatron(saved: Path) -> None:
    release = open_release(saved)
    norm = tensors_of(saved)[NORM]
    found = [
        release.read(each, "weight")
        for each in release.tensors()
        if each.name.startswith("decoder.layers.1.")
        and each.name.endswith(("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"))
    ]
    assert len(found) == 2
    assert all(torch.equal(each, norm) for each in found)


def test_settings_are_the_arguments_and_every_module_has_a_state(saved: Path) -> None:
    state = open_release(saved).megatron_state(with_optimizer=False, for_ep=None)
    assert isinstance(state, MegatronState)
    args = state.common["args"]
    assert (args.num_layers, args.add_bias_linear, args.no_save_optim) == (2, False, True)
    layer = "decoder.layers.1"
    wanted = {
        f"{layer}.mlp.experts.experts.linear_fc2._extra_state/shard_3_4",
        f"{layer}.self_attention.core_attention._extra_state/shard_0_1",
        f"{layer}.pre_mlp_layernorm._extra_state/shard_0_1",
        "decoder.final_layernorm._extra_state/shard_0_1",
    }
    assert wanted <= set(state.modules)


def test_numbers_of_the_rotary_embedding_are_left_out(saved: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(saved, lambda tensors: tensors.update({name: torch.ones(6)}))
    assert name not in open_release(saved).places


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", "has model_type=llama, but conversions know only .*mixtral"),
        ("architectures", ["MixtralForX"], "only MixtralForCausalLM of mixtral"),
        ("num_local_experts", ..., "must have num_local_experts for a model of mixtral, and lacks"),
        ("sliding_window", 16, "config.json has sliding_window=16"),
        ("hidden_act", "gelu", "config.json has hidden_act=gelu"),
        ("attention_bias", True, "config.json has attention_bias=True"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "config.json has rope_scaling=linear"),
        ("rope_parameters", {"rope_type": "yarn"}, "config.json has rope_scaling=yarn"),
        ("rope_parameters", {"rope_theta": 0.5}, "config.json has rope_theta=0.5"),
        ("num_experts_per_tok", 1, "norm_topk_prob=True and num_experts_per_tok=1"),
        (
            "quantization_config",
            {"bits": 4},
            "config.json has quantization_config with quant_method=None",
        ),
        ("head_dim", 6, r"q_proj.weight must have the shape \(24, 32\) by config.json, and has"),
        ("num_hidden_layers", 3, "lacks model.layers.2.input_layernorm.weight .and 3 others"),
    ],
)
def test_config_that_megatron_cannot_express_is_refused_by_name(
    key: str, value: Any, message: str, saved: Path
) -> None:
    change_config(saved, **{key: value})
    with pytest.raises(ConfigError, match=message):
        open_release(saved)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NORM, None, f"lacks {NORM}, by its config.json"),
        ("extra", torch.ones(1), "has an unknown tensor: extra, by its"),
        (NORM, torch.ones(3), rf"{NORM} must have the shape \(32,\)"),
    ],
)
def test_tensor_that_does_not_fit_is_named(
    name: str, value: torch.Tensor | None, message: str, saved: Path
) -> None:
    change = {} if value is None else {name: value}
    change_tensors(saved, lambda tensors: (tensors.pop(name, None), tensors.update(change)))
    with pytest.raises(ConfigError, match=message):
        open_release(saved)


@pytest.mark.parametrize("is_same", [True, False])
def test_head_of_a_tied_model_must_be_its_embedding(
    is_same: bool, saved: Path, tmp_path: Path
) -> None:
    change_config(saved, tie_word_embeddings=True)
    embedding = tensors_of(saved)["model.embed_tokens.weight"]
    embedding[3, 4] = 0.0
    head = embedding.clone()
    head[3, 4] = 0.0 if is_same else -0.0
    changes = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    change_tensors(saved, lambda tensors: tensors.update(changes))
    request = ConversionRequest(
        source=str(saved), destination=str(tmp_path / "out"), to="torch_dist"
    )
    if is_same:
        assert "verified" in convert(request)
    else:
        wanted = "lm_head.weight and model.embed_tokens.weight must be equal, .*tie_word_embeddings to false"
        with pytest.raises(ConfigError, match=wanted):
            convert(request)
        assert not list(tmp_path.glob("out*"))


def test_tensors_of_two_types_are_not_joined(saved: Path) -> None:
    change_tensors(saved, lambda tensors: tensors.update({GATE: tensors[GATE].half()}))
    with pytest.raises(ConfigError, match=r"w1.weight, .*w3.weight must have one type.*F16.*F32"):
        open_release(saved).tensors()


def test_index_decides_which_files_are_read(saved: Path) -> None:
    save_file({"other": torch.ones(2)}, saved / "other.safetensors")
    assert "other" not in open_release(saved).places
    index = json.loads((saved / INDEX).read_text())
    index["weight_map"]["lost"] = index["weight_map"][NORM]
    (saved / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptStateError, match=r"index.json names lost, and its file lacks it"):
        open_release(saved)


def test_folder_without_safetensors_is_refused(saved: Path) -> None:
    for path in saved.glob("model*"):
        path.unlink()
    with pytest.raises(ConfigError, match="must hold safetensors, and has no file of them"):
        open_release(saved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "hf"}, "--to=hf: .* is a model of Hugging Face"),
        ({"to": "safetensors"}, "--to=safetensors: .* is a set of safetensors"),
        ({"to": "torch_dist", "what": "all"}, "--what=all: only weights are read from"),
        ({"to": "torch_dist", "iteration": 3}, "--iteration=3: .* has no iterations"),
        ({"to": "torch_dist", "family": "mixtral"}, "--family=mixtral is only for --to hf"),
    ],
)
def test_conversion_that_makes_no_sense_is_refused(
    options: dict[str, Any], message: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(ConversionRequest(source=str(saved), destination=str(tmp_path / "out"), **options))
    assert not list(tmp_path.glob("out*"))


def test_command_prints_the_flags_of_the_model(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(saved), str(tmp_path / "out"), "--to", "torch_dist"]) == 0
    *_, title, flags = capsys.readouterr().out.splitlines()
    assert title == "flags of the model:"
    assert {"--disable-bias-linear", "--norm-epsilon", "--rotary-base"} <= set(flags.split())
    words = ["convert", str(saved), str(tmp_path / "other"), "--to", "hf", "--family", "mixtral"]
    assert main(words) == 2
    assert "--to=hf" in capsys.readouterr().err
