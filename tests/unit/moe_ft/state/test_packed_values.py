"""Values of records keep every bit, in memory and as JSON."""

import json
import math
from typing import Any

import pytest
import torch

from moe_ft.state.packed_values import copied, from_json, on_cpu, pack, to_json, unpack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_small_tensor_is_unpacked_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = unpack(pack(tensor))
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("value", [1, 0.1, True, None, "text", [1, [2.5]], {"a": {"b": [None]}}])
def test_plain_values_are_json_values_already(value: Any) -> None:
    assert to_json(value) == value
    assert from_json(json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_number_that_json_lacks_is_read_as_it_was(value: float) -> None:
    assert from_json(json.loads(json.dumps(to_json({"norm": value})))) == {"norm": value}
    assert math.isnan(from_json(to_json(math.nan)))


def test_tensor_among_values_is_read_as_it_was() -> None:
    found = from_json(json.loads(json.dumps(to_json([{"scale": torch.tensor([0.1, 3.0])}]))))
    assert torch.equal(found[0]["scale"], torch.tensor([0.1, 3.0]))


def test_copy_of_a_tensor_does_not_follow_it() -> None:
    tensor = torch.zeros(2)
    values = on_cpu({"all": [copied(tensor), copied("text")]})
    tensor.fill_(1)
    assert values["all"][0].tolist() == [0.0, 0.0]
    assert values["all"][1] == "text"
