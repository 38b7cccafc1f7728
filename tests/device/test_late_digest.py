"""The digest of a state on a late device, whose numbers are not there yet when it is asked for."""

import pytest
import torch

from tests.device.process import late_process
from tests.device.queues import Device
from tests.device.tensors import new
from tests.unit.moe_ft.state.test_digest import State


def _move(state: State, device: Device) -> None:
    """Have kernels that are still queued fill a model and its moments."""
    group = state.adam.param_groups[0]
    for place, (name, parameter) in enumerate([*state.model.named_parameters()]):
        late = torch.nn.Parameter(new(device, parameter.detach()))
        setattr(state.model, name, late)
        group["params"][place] = late
        moments = state.adam.state.pop(parameter)
        state.adam.state[late] = {key: new(device, each) for key, each in moments.items()}
    for name, buffer in [*state.model.named_buffers()]:
        state.model._buffers[name] = new(device, buffer)
    state.scale["scale"] = new(device, state.scale["scale"])


def test_digest_of_a_late_state_is_that_of_the_same_numbers_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(4, dtype=torch.uint8))
    expected, state = State().digest(), State()
    with late_process("digest", is_late=True) as device:
        _move(state, device)
        assert state.digest() == expected
        assert device.conflicts == []
