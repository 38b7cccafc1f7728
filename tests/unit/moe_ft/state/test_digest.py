"""Digests tell states apart by one bit, and only then."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_ft.state.digest import StateDigest, digest_state


class State:
    """A layer with buffers, its optimizer after a step, a scheduler and a loss scale."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = torch.nn.BatchNorm1d(3)
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.adam.step()
        self.scheduler: dict[str, Any] = {"num_steps": 8, "lr": 0.1, "name": ("a", None, True)}
        self.scale = {"scale": torch.tensor([65536.0])}
        self.counters = {"samples": 16}

    def digest(self) -> StateDigest:
        """Return the digests of the state as it is now."""
        scaler = SimpleNamespace(state_dict=lambda: self.scale)
        inner = SimpleNamespace(optimizer=self.adam, grad_scaler=scaler)
        scheduler = SimpleNamespace(state_dict=lambda: self.scheduler)
        return digest_state([self.model], inner, scheduler, self.counters)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(4, dtype=torch.uint8))


def flip_last_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8)[-1] ^= 1


def moment(state: State) -> torch.Tensor:
    found: torch.Tensor = state.adam.state[state.model.weight]["exp_avg_sq"]
    return found


WEIGHTS: list[Callable[[State], object]] = [
    lambda state: flip_last_bit(state.model.weight),
    lambda state: flip_last_bit(moment(state)),
    lambda state: state.adam.state[state.model.bias]["step"].add_(1),
]
OTHERS: list[Callable[[State], object]] = [
    lambda state: flip_last_bit(state.model.get_buffer("running_mean")),
    lambda state: flip_last_bit(state.scale["scale"]),
    lambda state: state.scheduler.update(num_steps=9),
    lambda state: state.scheduler.update(lr=float(np.nextafter(0.1, 1))),
    lambda state: state.scheduler.update(lr=float("nan")),
    lambda state: state.adam.param_groups[0].update(weight_decay=0.5),
    lambda state: state.counters.update(samples=17),
    lambda state: torch.rand(1),
    lambda state: random.random(),
    lambda state: np.random.rand(),
]


def test_equal_states_have_equal_digests() -> None:
    state = State()
    first = state.digest()
    assert state.digest() == first  # digesting changes nothing
    assert State().digest() == first


@pytest.mark.parametrize("change", range(len(WEIGHTS)))
def test_changed_weight_or_moment_changes_both_digests(change: int) -> None:
    state, before = State(), State().digest()
    WEIGHTS[change](state)
    after = state.digest()
    assert after.sha256 != before.sha256
    assert after.sha256_all != before.sha256_all


@pytest.mark.parametrize("change", range(len(OTHERS)))
def test_change_of_anything_else_changes_the_second_digest_only(change: int) -> None:
    before = State().digest()
    state = State()
    OTHERS[change](state)
    after = state.digest()
    assert after.sha256 == before.sha256
    assert after.sha256_all != before.sha256_all
