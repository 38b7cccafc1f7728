"""Loading a checkpoint gives torch's Adam moments to load into, and a step count for every parameter."""

from typing import Any

import pytest
import torch

from megatron.fault_tolerance.cpu import adam


class Optimizer:
    """As much of Megatron's DistributedOptimizer as the wrapped methods use, around torch's Adam."""

    is_stub_optimizer = False

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.optimizer = torch.optim.Adam(self.parameters)

    def _init_optimizer_states_with_dummy_values(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros(2)
        self.optimizer.step()

    def steps(self) -> list[float]:
        """Return the step counts of the parameters."""
        return [float(self.optimizer.state[each]["step"]) for each in self.parameters]


@pytest.fixture
def optimizer() -> Optimizer:
    return Optimizer()


def load(optimizer: Any, step: int) -> None:
    """Load a checkpoint as Megatron does: the count gets into the groups."""

    def original(optimizer: Any, state_dict: dict[str, int]) -> None:
        optimizer.optimizer.param_groups[0].update(state_dict)

    adam._with_own_steps(original)(optimizer, {"step": step})


def test_loaded_count_is_every_parameters_own(optimizer: Optimizer) -> None:
    optimizer._init_optimizer_states_with_dummy_values()
    load(optimizer, 7)
    assert optimizer.steps() == [7.0, 7.0]
    assert "step" not in optimizer.optimizer.param_groups[0]
    optimizer.optimizer.step()
    assert optimizer.steps() == [8.0, 8.0]


@pytest.mark.parametrize(("is_loading", "num_states"), [(True, 2), (False, 0)])
def test_moments_are_made_for_loading_only(
    is_loading: bool, num_states: int, optimizer: Optimizer
) -> None:
    seen: list[int] = []

    def original(optimizer: Any, model_state: Any, is_loading: bool) -> None:
        seen.append(len(optimizer.optimizer.state))

    adam._with_moments(original)(optimizer, {}, is_loading)
    assert seen == [num_states]


@pytest.mark.parametrize("step", [None, 3])
def test_step_of_a_parameter_may_be_missing(step: int | None) -> None:
    seen: list[dict[str, Any]] = []
    given = {"param": 1} if step is None else {"param": 1, "step": step}
    adam._with_any_step(lambda optimizer, parameter, tensors: seen.append(tensors))(0, 0, given)
    assert seen == [{"param": 1, "step": step}]
