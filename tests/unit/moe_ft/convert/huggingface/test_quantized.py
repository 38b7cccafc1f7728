"""Quantized models of Hugging Face are read as the numbers that they stand for, or refused by name.

The scales of FP8 are compared with a loop over all numbers, MXFP4 with the code of transformers.
"""

from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_ft.convert.huggingface.quantized import made_places
from moe_ft.convert.huggingface.release import open_release
from moe_ft.convert.safetensors_set import StoredTensor, list_tensors
from moe_ft.errors import ConfigError, CorruptStateError
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    SMALL,
    converted,
    random_model,
    tensors_of,
)
from tests.unit.moe_ft.convert.huggingface.test_release import change_config, change_tensors

BLOCK = (16, 24)  # neither divides every tensor
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [*BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
Q = "model.layers.1.self_attn.q_proj.weight"
SCALES = f"{Q}_scale_inv"


def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantize the weights of projections in place; return the numbers that these then stand for in fp32."""
    numbers: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if "_proj." in name]:
        weight = tensors[name].float()
        grid = torch.empty(
            [ceil(length / size) for length, size in zip(weight.shape, BLOCK, strict=True)]
        )
        found, made = (
            torch.empty(weight.shape, dtype=torch.float8_e4m3fn),
            torch.empty(weight.shape),
        )
        for row in range(grid.shape[0]):
            for column in range(grid.shape[1]):
                at = tuple(
                    slice(index * size, (index + 1) * size)
                    for index, size in zip((row, column), BLOCK, strict=True)
                )
                grid[row, column] = scale = weight[at].abs().max() / 448
                found[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
                made[at] = found[at].float() * scale
        tensors[name], tensors[f"{name}_scale_inv"], numbers[name] = found, grid, made
    return numbers


@pytest.fixture(scope="module")
def fp8_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Qwen3 in FP8; nobody may change it."""
    folder = tmp_path_factory.mktemp("fp8") / "saved"
    config = Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=24)
    random_model(config).to(torch.bfloat16).save_pretrained(folder)
    numbers: dict[str, torch.Tensor] = {}
    change_tensors(folder, lambda tensors: numbers.update(quantize(tensors)))
    change_config(folder, quantization_config=FP8)
    torch.save(numbers, folder / "numbers.pt")
    return folder


@pytest.fixture
def fp8(fp8_once: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder."""
    folder = tmp_path / "saved"
    folder.mkdir()
    for path in fp8_once.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_comes_back_as_its_numbers_without_scales(fp8: Path, dtype: torch.dtype) -> None:
    name = {torch.bfloat16: None, torch.float32: "fp32"}[dtype]
    checkpoint, printed = converted(fp8, "torch_dist", dtype=name)
    numbers = torch.load(fp8 / "numbers.pt")
    assert f"{len(numbers)} tensors were in fp8 and are BF16 now" in printed
    back, _ = converted(checkpoint, "hf")
    found, stored = tensors_of(back), tensors_of(fp8)
    assert {*found} == {each for each in stored if not each.endswith("_scale_inv")}
    for each, tensor in found.items():
        assert torch.equal(tensor, numbers.get(each, stored[each]).to(dtype)), each
    assert "quantization_config" not in (back / "config.json").read_text()


def test_scales_of_two_bytes_are_read_too(fp8: Path) -> None:
    change_tensors(fp8, lambda tensors: tensors.update({SCALES: tensors[SCALES].bfloat16()}))
    assert open_release(fp8).places[Q].read(Q).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {SCALES: None},
            f"must have {SCALES}, the scales of {Q} by .*config.json, and no file has it",
        ),
        (
            {SCALES: torch.ones(3, 1)},
            rf"{SCALES} must have the shape \(3, 2\) and the type F32 or BF16",
        ),
        ({SCALES: torch.ones(3, 2).half()}, "must have the shape .* and has .* and F16"),
        ({Q: torch.ones(48, 32)}, f"has {SCALES} without a tensor of the type F8_E4M3"),
        ({Q: torch.ones(48, 32).to(torch.float8_e5m2), SCALES: None}, "type F8_E5M2 and no scales"),
        ({Q: torch.ones(48).to(torch.float8_e4m3fn)}, "q_proj.weight has the type F8_E4M3 and no"),
    ],
)
def test_weights_and_scales_that_have_not_each_other_are_named(
    changes: dict[str, torch.Tensor | None], message: str, fp8: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in changes.items():
            tensors.pop(name)
            tensors.update({} if tensor is None else {name: tensor})

    change_tensors(fp8, change)
    with pytest.raises(ConfigError, match=message):
        open_release(fp8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scale_that_is_no_number_is_an_error(value: float, fp8: Path) -> None:
    change_tensors(fp8, lambda tensors: tensors[SCALES][1, 1].fill_(value))
    with pytest.raises(CorruptStateError, match=f"scales of {Q} are no finite numbers"):
        converted(fp8, "torch_dist")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, "quant_method='awq', and conversions read only fp8 or mxfp4"),
        ({"weight_block_size": None}, "weight_block_size=None"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]"),
        ({"fmt": "e5m2"}, "fmt='e5m2', and conversions read only e4m3"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
    ],
)
def test_other_quantization_is_refused_by_its_key(
    changes: dict[str, Any], message: str, fp8: Path
) -> None:
    change_config(fp8, quantization_config={**FP8, **changes})
    with pytest.raises(ConfigError, match=f"quantization_config with {message}"):
        open_release(fp8)


def test_fp8_without_a_word_in_the_config_is_refused(fp8: Path) -> None:
    change_config(fp8, quantization_config=...)
    with pytest.raises(ConfigError, match="has the type F8_E4M3 and no scales"):
        open_release(fp8)


def mxfp4(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]
) -> dict[str, StoredTensor]:
    """Return the places of tensors in MXFP4 with every byte and many scales."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 1100, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (2, 1100, 3), generator=generator, dtype=torch.uint8)
    tensors = {"w_blocks": blocks, "w_scales": scales, "bias": torch.ones(2)}
    change(tensors)
    save_file(tensors, folder / "file")
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    return dict(made_places("config.json", config, list_tensors(folder / "file"))[0])


def test_mxfp4_has_the_numbers_of_transformers(tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}
    places = mxfp4(tmp_path, kept.update)
    expected = convert_moe_packed_tensors(kept["w_blocks"], kept["w_scales"])
    assert (set(places), places["w"].shape) == ({"w", "bias"}, (2, 96, 1100))
    assert torch.equal(places["w"].read("w"), expected)
    assert torch.equal(places["w"].at(1).read("w"), expected[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("w_scales"), "must have w_scales, the scales of w_blocks"),
        (lambda tensors: tensors.pop("w_blocks"), "has w_scales without the blocks of it"),
        (
            lambda tensors: tensors.update(w_scales=torch.ones(2, 3)),
            r"must have the shape \(2, 1100, 3\)",
        ),
        (lambda tensors: tensors.update(w_blocks=torch.ones(2, 3, 8)), "must be of the type U8"),
    ],
)
def test_mxfp4_whose_parts_do_not_fit_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        mxfp4(tmp_path, change)


def test_scale_of_mxfp4_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    places = mxfp4(tmp_path, lambda tensors: tensors["w_scales"][1, 5, 2].fill_(255))
    places["w"].at(0).read("w")
    with pytest.raises(CorruptStateError, match="scales of w are no finite numbers"):
        places["w"].at(1).read("w")
