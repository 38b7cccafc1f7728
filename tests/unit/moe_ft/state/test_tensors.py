"""Every parameter, buffer and optimizer tensor of a rank has one name."""

from types import SimpleNamespace
from typing import Any

import torch

from moe_ft.state.tensors import (
    all_buffers,
    named_buffers,
    named_optimizer_tensors,
    named_parameters,
)


def chunks() -> list[torch.nn.Module]:
    """Return two model chunks, the first with a buffer."""
    return [torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 3, bias=False).bfloat16()]


def half_precision_optimizer(model: list[torch.nn.Module]) -> Any:
    """Return an optimizer with fp32 masters of the BF16 weights, after one step."""
    weights = [p for p in model[1].parameters()]
    masters = [torch.nn.Parameter(each.detach().float()) for each in weights]
    adam = torch.optim.Adam(masters)
    masters[0].grad = torch.ones_like(masters[0])
    adam.step()
    return SimpleNamespace(
        optimizer=adam, float16_groups=[weights], fp32_from_float16_groups=[masters]
    )


def test_names_of_parameters_and_buffers_begin_with_their_chunk() -> None:
    model = chunks()
    names = [name for name, _ in named_parameters(model)]
    assert names == ["chunk0.weight", "chunk0.bias", "chunk1.weight"]
    buffers = dict(named_buffers(model))
    assert list(buffers) == [f"chunk0.{name}" for name, _ in model[0].named_buffers()]
    places = all_buffers(model)
    assert all(places[name][0]._buffers[places[name][1]] is buffers[name] for name in buffers)


def test_masters_and_moments_have_the_name_of_their_parameter() -> None:
    model = chunks()
    inner = half_precision_optimizer(model)
    found = dict(named_optimizer_tensors(model, inner))
    keys = ("param", "step", "exp_avg", "exp_avg_sq")
    assert set(found) == {f"chunk1.weight/{key}" for key in keys}
    assert found["chunk1.weight/param"] is inner.fp32_from_float16_groups[0][0]


def test_parameter_that_the_optimizer_updates_itself_is_no_master() -> None:
    model = chunks()
    inner = SimpleNamespace(optimizer=torch.optim.SGD(model[0].parameters(), momentum=0.5))
    assert list(named_optimizer_tensors(model, inner)) == []
