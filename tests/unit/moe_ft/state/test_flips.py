"""Flips of bits change one bit of one tensor, where the target says, and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ft.faults import FlipTarget
from moe_ft.state.flips import arm, flip_bit

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Small(torch.nn.Module):
    """A model with an embedding, a layer that has a router and experts, and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(4, 4)
        self.decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Layer()])})
        self.output = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder["layers"][0](self.embedding(inputs))[0]  # type: ignore[index]
        return torch.sum(self.output(hidden))


class Layer(torch.nn.Module):
    """A router and an expert, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_number = 1
        self.mlp = torch.nn.ModuleDict({"router": torch.nn.Linear(4, 4)})
        self.mlp["experts"] = torch.nn.ModuleDict({"fc1": torch.nn.Linear(4, 4)})

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.mlp["experts"]["fc1"](self.mlp["router"](hidden)), None  # type: ignore[index]


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().view(_WORDS[tensor.element_size()]).reshape(-1)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]
)
def test_every_bit_of_any_type_can_be_flipped_alone(dtype: torch.dtype) -> None:
    tensor = (torch.arange(1, 7).reshape(2, 3) * 3).to(dtype).t()  # not contiguous
    for bit in range(8 * tensor.element_size()):
        before = words(tensor)
        index, flipped = flip_bit(tensor, bit, bit)
        changed = (words(tensor) ^ before).to(torch.int64) & (2 ** (8 * tensor.element_size()) - 1)
        assert flipped == bit and changed.nonzero().tolist() == [[index]]
        assert int(changed[index]) & (2**64 - 1) == 1 << bit or bit == 63
        flip_bit(tensor, bit, bit)
        assert torch.equal(words(tensor), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_default_bit_changes_a_number_that_is_not_zero_and_stays_finite(dtype: torch.dtype) -> None:
    tensor = torch.zeros(64, dtype=dtype)
    tensor[17] = torch.finfo(dtype).max
    index, _ = flip_bit(tensor, 5)
    assert index == 17
    assert tensor[17].isfinite() and tensor[17] < torch.finfo(dtype).max
    flip_bit(zeros := torch.zeros(3, dtype=dtype), 1)
    assert zeros.count_nonzero() == 1


def built(model: torch.nn.Module) -> Any:
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).backward()
    adam.step()
    adam.zero_grad()
    return [model], SimpleNamespace(optimizer=adam), None


def all_words(model: torch.nn.Module, state: Any) -> dict[str, torch.Tensor]:
    """Return the parameters, the moments and the gradients of one pass, as words."""
    model(torch.ones(2, 4)).backward()
    found = {name: words(each) for name, each in model.named_parameters()}
    found |= {f"{name}.grad": words(each.grad) for name, each in model.named_parameters()}  # type: ignore[arg-type]
    for name, each in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{key}"] = words(state[1].optimizer.state[each][key])
        each.grad = None
    return found


@pytest.mark.parametrize("target", FlipTarget)
def test_consecutive_numbers_flip_one_bit_each_in_different_parts(target: FlipTarget) -> None:
    hit = set()
    for number in range(4):
        torch.manual_seed(0)
        model = Small()
        state = built(model)
        torch.manual_seed(0)
        other = Small()
        expected = all_words(other, built(other))
        flipped: list[str] = []

        def flip(name: str, tensor: torch.Tensor) -> None:
            flipped.append(name)  # noqa: B023
            flip_bit(tensor, number)  # noqa: B023

        arm(target, state, number, flip)
        found = all_words(model, state)
        for _ in range(2):
            all_words(model, state)
        assert len(flipped) == 1, "in one pass"
        changed = {name for name in found if not torch.equal(found[name], expected[name])}
        (name,) = flipped
        hit.add(name)
        if target is FlipTarget.ACTIVATION:
            assert name == "decoder.layers.0.output"
            assert changed == {"output.weight.grad"}, "the layer's input is right"
        elif target is FlipTarget.GRADIENTS:
            assert changed == {f"{name}.grad"}
        elif target is FlipTarget.MOMENT:
            assert changed == {name}
        else:
            assert {each for each in changed if not each.endswith(".grad")} == {name}
    if target is not FlipTarget.ACTIVATION:
        for part in ("embedding", "router", "experts", "output"):
            assert any(part in name for name in hit), hit


def test_flip_that_is_called_off_never_happens() -> None:
    model = Small()
    state = built(model)
    for target in (FlipTarget.WEIGHTS, FlipTarget.GRADIENTS, FlipTarget.ACTIVATION):
        arm(target, state, 1, lambda *_: pytest.fail("it flips"))()
    all_words(model, state)
