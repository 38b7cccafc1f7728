"""Writing models of Hugging Face: the family, the files, and what does not fit."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ft.convert.conversion import ConversionRequest, convert, open_model
from moe_ft.convert.huggingface.config_file import FAMILIES
from moe_ft.convert.huggingface.release import open_release
from moe_ft.convert.huggingface.writing import HuggingFace, choose_family
from moe_ft.convert.model import Item, SourceModel
from moe_ft.convert.tensors import GlobalTensor
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.models import V3
from tests.unit.moe_ft.convert.huggingface.round_trip import converted, loaded, tensors_of

ROUTER = "decoder.layers.1.mlp.router.weight"


@pytest.fixture(scope="module")
def checkpoint(saved_once: Path) -> Path:
    """Return a Megatron checkpoint of the model; nobody may change it."""
    return converted(saved_once, "torch_dist")[0]


def opened(checkpoint: Path, **changes: Any) -> Any:
    """Return the model of the checkpoint with settings changed."""
    model: Any = open_model(str(checkpoint))
    return replace(model, settings={**model.settings, **changes})


def test_family_is_the_one_that_has_the_settings(checkpoint: Path) -> None:
    assert choose_family(opened(checkpoint), None).model_type == "mixtral"
    qwen3 = opened(checkpoint, **{"--qk-layernorm": True})
    assert choose_family(qwen3, None).model_type == "qwen3_moe"


def test_model_of_no_family_is_refused_with_the_reason_of_each(checkpoint: Path) -> None:
    model = opened(checkpoint, **{"--swiglu": False})
    with pytest.raises(ConfigError, match=r"(?s)of none:.*mixtral: --swiglu=False.*qwen3_moe: "):
        choose_family(model, None)


def test_family_that_another_has_too_is_chosen_by_its_name_alone(checkpoint: Path) -> None:
    model = replace(opened(checkpoint), settings=V3)
    assert choose_family(model, None).model_type == "deepseek_v3"
    kimi = choose_family(model, "kimi_k2")
    assert (kimi.model_type, kimi.architecture) == ("kimi_k2", "DeepseekV3ForCausalLM")
    assert kimi.config(V3) == FAMILIES["deepseek_v3"].config(V3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3_moe", "--qk-layernorm=None must be True for a model of qwen3_moe"),
        ("gpt2", "--family=gpt2 must be one of .*mixtral"),
    ],
)
def test_family_that_is_named_must_fit(name: str, message: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_family(opened(checkpoint), name)


@pytest.mark.parametrize("name", [None, "mixtral"])
def test_model_that_does_not_say_a_setting_is_refused_by_name(
    name: str | None, checkpoint: Path
) -> None:
    model = opened(checkpoint)
    del model.settings["--num-layers"]
    with pytest.raises(ConfigError, match="must say what --num-layers was, and does not"):
        choose_family(model, name)


def select(model: SourceModel, tensors: Sequence[GlobalTensor]) -> Sequence[GlobalTensor]:
    return HuggingFace(model, "mixtral").select(tensors)


def test_tensors_that_do_not_fit_are_named(checkpoint: Path) -> None:
    model = opened(checkpoint)
    tensors = {each.name: each for each in model.tensors()}
    without = [each for name, each in tensors.items() if name != ROUTER]
    with pytest.raises(ConfigError, match=f"lacks {ROUTER}, as a model of mixtral"):
        select(model, without)
    with pytest.raises(ConfigError, match="tensor that the family does not know: more.weight"):
        select(model, [*tensors.values(), replace(tensors[ROUTER], name="more.weight")])
    other = replace(tensors[ROUTER], shape=(4, 31))
    with pytest.raises(ConfigError, match=rf"{ROUTER} has the shape \(4, 31\), and a model of mix"):
        select(model, [*without, other])


def test_padding_of_the_vocabulary_is_left_out(checkpoint: Path, tmp_path: Path) -> None:
    model = opened(checkpoint, **{"--vocab-size": 90})
    written = HuggingFace(model, None)
    selected = written.select(model.tensors())
    (embedding,) = (each for each in selected if each.name.startswith("embedding"))
    assert embedding.shape == (101, 32)
    written.write_shard(tmp_path, 0, 1, [Item(tensor=embedding, kind="weight", dtype="F32")])
    (found,) = tensors_of(tmp_path).values()
    assert torch.equal(found, model.read(embedding, "weight")[:90])


def test_norm_with_two_names_is_written_once(checkpoint: Path) -> None:
    model = opened(checkpoint)
    names = [each.name for each in select(model, model.tensors())]
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" not in names


def test_dry_run_lists_names_of_the_hub(checkpoint: Path, tmp_path: Path) -> None:
    request = ConversionRequest(source=str(checkpoint), destination=str(tmp_path / "out"), to="hf")
    lines = convert(request, is_dry_run=True).splitlines()
    (line,) = (each for each in lines if "experts.3.w1.weight" in each and "layers.1." in each)
    assert "layer.1.expert.3" in line
    assert "model.layers.1.block_sparse_moe.experts.3.w3.weight" in line
    assert not list(tmp_path.glob("out*"))


def test_type_of_the_weights_is_in_the_config(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    convert(
        ConversionRequest(source=str(checkpoint), destination=str(folder), to="hf", dtype="bf16")
    )
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert str(loaded(folder).dtype) == "torch.bfloat16"
    assert {each.dtype for each in open_release(folder).places.values()} == {"BF16"}
