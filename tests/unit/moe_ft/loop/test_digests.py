"""Digests are written for the state that they name, at the iterations that are asked for."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.config.config import ObservabilityConfig
from moe_ft.events import EventLog
from moe_ft.loop.digests import Digests
from moe_ft.loop.listeners import Built, LoopState
from moe_ft.state.digest import digest_state
from tests.unit.fault_tolerance.loops import ended, events_in, last_event

EVERY = ObservabilityConfig(event_log="somewhere", state_digest_interval=3)
LAST = ObservabilityConfig(event_log="somewhere", state_digest=True)


class Scheduler:
    """As much of Megatron's as a digest reads."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"num_steps": 12}


class Optimizer:
    """As much of Megatron's as a digest reads."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.optimizer = torch.optim.SGD([weight], lr=0.5)
        self.chained_optimizers = [self]
        self.grad_scaler = None


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)  # without a GPU
    model = torch.nn.Linear(2, 2)
    return [model], Optimizer(model.weight), Scheduler()


def digests_of(config: ObservabilityConfig, log: EventLog, built: Built) -> Digests:
    digests = Digests(config, MegatronLoop(), LoopState(iteration=6), log)
    digests.after_setup(built)
    return digests


def test_digest_of_an_iteration_counts_the_samples_that_megatron_will_add(
    event_log: EventLog, built: Built, loop_args: Namespace
) -> None:
    loop_args.consumed_train_samples, loop_args.consumed_valid_samples = 40, 4
    digests_of(EVERY, event_log, built).after_iteration(ended(6))
    counters = {"iteration": 6, "consumed_train_samples": 48, "consumed_valid_samples": 4}
    expected = digest_state(*built, counters)
    assert last_event(event_log) == {
        "event": "state_digest",
        "iteration": 6,
        "sha256": expected.sha256,
        "sha256_all": expected.sha256_all,
    }


def test_digest_of_the_end_equals_that_of_the_last_iteration(
    event_log: EventLog, built: Built, loop_args: Namespace
) -> None:
    loop_args.consumed_train_samples = 40
    digests_of(EVERY, event_log, built).after_iteration(ended(6))
    loop_args.consumed_train_samples = 48
    digests_of(LAST, event_log, built).after_training()
    first, second = events_in(event_log)
    assert first["sha256_all"] == second["sha256_all"]


def test_other_iterations_have_no_digest(
    event_log: EventLog, built: Built, loop_args: Namespace
) -> None:
    digests = digests_of(EVERY, event_log, built)
    digests.after_iteration(ended(5))
    digests.after_training()
    digests_of(LAST, event_log, built).after_iteration(ended(6))
    assert events_in(event_log) == []
