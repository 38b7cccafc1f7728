"""Random numbers continue where their states were taken."""

import json
import random

import numpy as np
import pytest
import torch

from moe_ft.state.random_states import apply_rng, current_rng


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
