"""Random numbers continue where their states were taken."""

import json
import random

import numpy as np
import pytest
import torch

from moe_ft.state.random_states import apply_rng, current_rng, rng_values


def test_random_numbers_continue_where_they_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)  # without a GPU
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)

    def draw() -> tuple[float, float, float]:
        return random.gauss(), float(np.random.normal()), float(torch.rand(1))

    random.gauss()
    np.random.normal()  # both keep a second number for the next call
    states = json.loads(json.dumps(current_rng()))
    expected = draw()
    assert draw() != expected
    apply_rng(states)
    assert draw() == expected


def test_states_have_the_names_of_megatrons_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    values = rng_values(current_rng())
    assert values["random_rng_state"] == random.getstate()
    assert torch.equal(values["torch_rng_state"], torch.get_rng_state())
    assert values.keys() == {
        *("random_rng_state", "np_rng_state", "torch_rng_state"),
        *("cuda_rng_state", "rng_tracker_states"),
    }
