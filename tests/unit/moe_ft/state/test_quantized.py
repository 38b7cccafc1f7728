"""FP8 parameters are known by their bytes and scales; stand-ins are in tests/fp8_tensors.py."""

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ft.format.packings import Packing
from moe_ft.state import quantized, slices
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.quantized import quantized_parts
from moe_ft.units import Level, parse_unit
from tests import fp8_tensors

KINDS: dict[str, Any] = {
    "delayed": lambda: fp8_tensors.Float8Quantizer(torch.ones(1), torch.zeros(1)),
    "tensorwise": fp8_tensors.Float8CurrentScalingQuantizer,
    "blockwise": fp8_tensors.Float8BlockQuantizer,
    "mxfp8": fp8_tensors.MXFP8Quantizer,
}
SHAPE = 192, 160  # no multiple of 128


def made(kind: str, *, seed: int = 0) -> Any:
    numbers = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return torch.nn.Parameter(KINDS[kind]().make(numbers.bfloat16()))


@pytest.fixture(autouse=True)
def of_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_quantized(tensor: torch.Tensor) -> bool:
        return isinstance(tensor, fp8_tensors.QuantizedTensor)

    for module in (quantized, slices):
        monkeypatch.setattr(module, "is_quantized", is_quantized)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_determine_the_numbers_by_rows_and_by_columns(kind: str) -> None:
    parameter = made(kind)
    for _, part in quantized_parts(parameter):
        before = parameter.dequantize(), parameter.by_columns()
        place = part[(-1,) * part.dim()]
        place.add_(8)
        after = parameter.dequantize(), parameter.by_columns()
        assert not all(torch.equal(*each) for each in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", ["blockwise", "mxfp8"])
def test_padding_of_scales_is_no_part(kind: str) -> None:
    parameter = made(kind)
    before = [part.clone() for _, part in quantized_parts(parameter)]
    for name in ("_rowwise_scale_inv", "_columnwise_scale_inv"):
        scales = getattr(parameter, name)
        kept = [part for found, part in quantized_parts(parameter) if f"_{found}" == name]
        assert kept[0].numel() < scales.numel()
        used = kept[0].clone()
        scales.fill_(3)
        kept[0].copy_(used)
    after = [part for _, part in quantized_parts(parameter)]
    assert all(torch.equal(*each) for each in zip(before, after, strict=True))


def test_transpose_that_is_made_anew_is_no_part() -> None:
    parameter = made("delayed")
    assert "transpose" in dict(quantized_parts(parameter))
    parameter._transpose_invalid = True
    assert "transpose" not in dict(quantized_parts(parameter))


def local(kind: str) -> LocalParameter:
    config = SimpleNamespace(optimizer="adam")
    unit: Any = parse_unit("embedding")
    return LocalParameter(
        unit=unit,
        name="weight",
        entry=None,  # type: ignore[arg-type]
        parameter=made(kind),
        start=1000,
        end=1010,
        optimizer=SimpleNamespace(config=config, optimizer=None),
        master=torch.arange(10.0) + 0.001,
        is_sharded=True,
        is_expert=False,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_weight_of_a_unit_that_computes_is_its_slice_of_masters_in_the_models_type(
    kind: str,
) -> None:
    own = local(kind)
    (entry,) = slices.describe(own, Level.COMPUTE)
    assert (entry.key, entry.dtype, entry.start, entry.end) == ("weight", "BF16", 1000, 1010)
    assert own.master is not None
    live = slices.live_tensor(own, "weight")
    assert live is not None
    assert torch.equal(live, own.master)
    live.zero_()
    assert not own.master.any()  # a restore writes into the masters


def test_masters_of_fp8_parameters_cannot_be_split_into_weights_and_the_rest() -> None:
    own = local("mxfp8")
    catalog = UnitCatalog([own], leaves_out_frozen=False, packings={"master": Packing.SPLIT})
    master = catalog.tensors(own.unit, Level.FULL)[0]
    assert (master.key, master.packing) == ("param", Packing.EXACT)


# Transformer Engine's modules that have them, below transformer_engine.pytorch.tensor.
MODULES = {
    "Float8Tensor": "float8_tensor",
    "Float8BlockwiseQTensor": "float8_blockwise_tensor",
    "MXFP8Tensor": "mxfp8_tensor",
}


@pytest.mark.parametrize("name", fp8_tensors.NAMES)
def test_stand_ins_have_the_names_of_the_published_source(name: str) -> None:
    kind = {
        "Float8Tensor": "delayed",
        "Float8BlockwiseQTensor": "blockwise",
        "MXFP8Tensor": "mxfp8",
    }
    tensor = made(kind[name])
    assert type(tensor).__name__ == name
    assert all(hasattr(tensor, each) for each in fp8_tensors.NAMES[name].split())
    for call, parameters in fp8_tensors.CALLS.items():
        assert tuple(inspect.signature(getattr(fp8_tensors, call)).parameters) == parameters


@pytest.mark.parametrize("name", fp8_tensors.NAMES)
def test_transformer_engine_has_the_names_of_the_stand_ins(name: str) -> None:
    tensors = "transformer_engine.pytorch.tensor"
    pytest.importorskip(tensors)
    found = getattr(importlib.import_module(f"{tensors}.{MODULES[name]}"), name)
    known = {
        each
        for kind in found.__mro__
        for each in (*vars(kind), *vars(kind).get("__annotations__", ()))
    }
    assert set(fp8_tensors.NAMES[name].split()) <= known
    utils = importlib.import_module(f"{tensors}.utils")
    for call, parameters in fp8_tensors.CALLS.items():
        assert tuple(inspect.signature(getattr(utils, call)).parameters) == parameters
