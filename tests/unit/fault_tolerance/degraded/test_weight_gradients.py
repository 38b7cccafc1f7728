"""Gradients of weights that are put off: of Megatron's local layers, and by modules of Transformer Engine."""

from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication
from megatron.core.transformer import TransformerConfig

from megatron.fault_tolerance.degraded.weight_gradients import LateGradients
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.planning.schedules import Turn

TURNS = [Turn(0, 0), Turn(1, 0)]


class Delayed(torch.nn.Module):
    """Module as Transformer Engine has them, which puts its gradients off itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wgrad_store = Namespace(delay_wgrad_compute=lambda: True)
        self.num_run = 0

    def backward_dw(self) -> None:
        self.num_run += 1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateGradients]:
    monkeypatch.setattr(schedules, "backward_step", lambda: None)
    with Patches() as patches:
        found = LateGradients()
        found.install(patches)
        yield found


def linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    arguments = (False, False, False, None, 0, None, 1)
    function = LinearWithGradAccumulationAndAsyncCommunication
    found: torch.Tensor = function.apply(given, weight, bias, *arguments)
    return found


def test_product_for_a_weight_is_made_when_its_turn_comes(late: LateGradients) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 2))
    weight.main_grad = torch.zeros(3, 2)  # type: ignore[attr-defined]
    inputs = [torch.randn(4, 2, requires_grad=True) for _ in TURNS]
    for turn, given in zip(TURNS, inputs, strict=True):
        with late.put_off(turn):
            linear(given, weight, None).sum().backward()
        assert torch.equal(given.grad, torch.ones(4, 3) @ weight)  # type: ignore[arg-type]
    assert weight.grad is None
    expected = torch.zeros(3, 2)
    for turn, given in zip(TURNS, inputs, strict=True):
        late.run(turn)
        expected += torch.ones(4, 3).t() @ given.detach()
        assert torch.equal(weight.main_grad, expected)  # type: ignore[attr-defined]


def test_weight_with_a_bias_gets_its_gradient_at_once(late: LateGradients) -> None:
    weight, bias = torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.zeros(3))
    with late.put_off(TURNS[0]):
        linear(torch.randn(4, 2), weight, bias).sum().backward()
    assert weight.grad is not None and bias.grad is not None


def test_modules_of_transformer_engine_run_at_once_in_megatrons_schedule_and_else_in_turn(
    late: LateGradients,
) -> None:
    module = Delayed()
    late.model = [torch.nn.Sequential(torch.nn.Linear(2, 2), module)]
    schedules.backward_step()
    assert module.num_run == 1
    with late.put_off(TURNS[0]):
        schedules.backward_step()
    assert module.num_run == 1
    late.run(TURNS[0])
    assert module.num_run == 2


@pytest.mark.parametrize(("kind", "is_delayed"), [("transformer_engine", True), ("local", False)])
def test_layers_of_transformer_engine_are_built_so_that_they_can_put_gradients_off(
    late: LateGradients, kind: str, is_delayed: bool
) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, transformer_impl=kind
    )
    assert config.delay_wgrad_compute is is_delayed
