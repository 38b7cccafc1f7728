"""Places of tensors in the whole model, from objects that Megatron's own classes describe."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from moe_ft.format.entries import GlobalPlace, ModelPlaces
from moe_ft.state import global_places
from moe_ft.state.global_places import find_places, model_places, with_places
from moe_ft.units import UnitId, UnitKind
from tests import fp8_tensors
from tests.unit.moe_ft.builders import make_parameter

STACK = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"


class Model(torch.nn.Module):
    """A model whose tensors are divided as its second of two tensor-parallel ranks has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(3, 4))
        self.gate_up = torch.nn.Parameter(torch.zeros(4, 5))
        self.register_buffer("bias", torch.zeros(2))
        self.seen: dict[str, Any] = {}

    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> dict[str, Any]:
        """Describe the tensors as Megatron's modules do."""
        self.seen = metadata
        one = ShardedTensor.from_rank_offsets
        return {
            "a": one("embedding.weight", self.embedding, (0, 1, 2)),
            "b": ShardedTensorFactory(STACK, self.gate_up, self.split, lambda parts: parts),
            "c": {"nested": one("decoder.layers.2.mlp.router.expert_bias", self.bias)},
            "d": ShardedObject("norm._extra_state", None, (1,), (0,)),
            "e": 5,
        }

    def split(self, key: str, tensor: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
        """Divide gate and up separately, of the fourth of six experts."""
        return [
            ShardedTensor.from_rank_offsets(
                key, half, (0, 3, 6), (1, 2 * number + 1, 4), prepend_axis_num=1
            )
            for number, half in enumerate(tensor.chunk(2))
        ]


@pytest.fixture
def model() -> Model:
    return Model()


def test_halves_of_an_fp8_parameter_have_the_places_of_other_parameters(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = find_places([model], "group").of[model.gate_up]
    monkeypatch.setattr(
        global_places, "is_quantized", lambda each: isinstance(each, fp8_tensors.QuantizedTensor)
    )
    numbers = torch.zeros(4, 5, dtype=torch.bfloat16)
    model.gate_up = torch.nn.Parameter(fp8_tensors.Float8BlockQuantizer().make(numbers))
    assert find_places([model], "group").of[model.gate_up] == expected


def test_block_of_a_tensor_parallel_rank_has_its_offset(model: Model) -> None:
    found = find_places([model], "group").of[model.embedding]
    assert found == (GlobalPlace("embedding.weight", (6, 4), (3, 0), (0, 0), (3, 4)),)
    assert model.seen["dp_cp_group"] == "group"
    assert model.seen["non_homogeneous_layers"]


def test_halves_of_an_experts_matrix_have_places_in_the_stack(model: Model) -> None:
    assert find_places([model], None).of[model.gate_up] == (
        GlobalPlace(STACK, (6, 8, 5), (3, 2, 0), (0, 0), (2, 5)),
        GlobalPlace(STACK, (6, 8, 5), (3, 6, 0), (2, 0), (2, 5)),
    )


def test_part_that_is_no_block_of_its_tensor_has_no_place(model: Model) -> None:
    model.split = lambda key, tensor, *_: [  # type: ignore[method-assign]
        ShardedTensor.from_rank_offsets(key, tensor.clone()),
        ShardedTensor.from_rank_offsets(key, tensor.T),
    ]
    assert find_places([model], None).of[model.gate_up] == ()


def test_model_that_megatron_cannot_describe_has_a_problem(model: Model) -> None:
    model.split = lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    places = find_places([model], None)
    assert not places.of
    assert model_places([model], places) == ModelPlaces(
        problem="ZeroDivisionError: division by zero"
    )


def test_entries_get_the_places_and_the_type_of_the_weight(model: Model) -> None:
    unit = UnitId(kind=UnitKind.EMBEDDING)
    local = make_parameter(unit, parameter=model.embedding)
    places = find_places([model], None)
    (found,) = with_places([local], places)
    assert local.parameter is not model.embedding  # builders wrap it again: it has no place
    assert (found.entry.dtype, found.entry.places) == ("F32", ())
    own = SimpleNamespace(of={local.parameter: places.of[model.embedding]})
    (found,) = with_places([local], own)  # type: ignore[arg-type]
    assert isinstance(found.entry.places, tuple)
    assert found.entry.places[0].key == "embedding.weight"
    assert found.entry.shape == local.entry.shape


def test_buffers_and_objects_are_named(model: Model) -> None:
    assert model_places([model], find_places([model], None)) == ModelPlaces(
        buffers={
            "chunk0.bias": (
                GlobalPlace("decoder.layers.2.mlp.router.expert_bias", (2,), (0,), (0,), (2,)),
            )
        },
        objects=("norm._extra_state/shard_0_1",),
    )
