"""Values of records keep every bit, in memory and as JSON."""

import json
import math

import pytest
import torch

from moe_ft.state.packed_values import from_json, pack, to_json, unpack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_small_tensor_is_unpacked_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = unpack(pack(tensor))
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_number_that_json_lacks_is_read_as_it_was(value: float) -> None:
    assert from_json(json.loads(json.dumps(to_json({"norm": value})))) == {"norm": value}
    assert math.isnan(from_json(to_json(math.nan)))


def test_tensor_among_values_is_read_as_it_was() -> None:
    found = from_json(json.loads(json.dumps(to_json([{"scale": torch.tensor([0.1, 3.0])}]))))
    assert torch.equal(found[0]["scale"], torch.tensor([0.1, 3.0]))
