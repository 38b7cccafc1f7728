"""A recovery continues in the loop: data position, replay and random numbers, each when the loop needs it."""

import random
from argparse import Namespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.format.records import IterationRecord, JobNumbers, numbers_of
from moe_ft.loop.listeners import LoopState
from moe_ft.loop.resumption import Replay, Resumption
from moe_ft.loop.training_loop import LoopParts
from moe_ft.recovery.borders import Borders
from moe_ft.state.random_states import current_rng
from tests.unit.moe_ft.builders import make_record

PARTS = LoopParts(
    forward_step=print,
    data_iterator=None,
    model=[],
    optimizer=Namespace(chained_optimizers=[], config=Namespace()),
    config=Namespace(
        tensor_model_parallel_size=1, gtp_weight_remat_size=1, expert_gtp_weight_remat_size=1
    ),
    forward_backward=print,
)


@pytest.fixture
def args(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)  # without a GPU
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    return loop_args


def record_of(iteration: int) -> IterationRecord:
    """Return a record with the random numbers of now."""
    return msgspec.structs.replace(make_record(iteration), rng=current_rng())


def resumption_of(*states: IterationRecord, tail: tuple[JobNumbers, ...] = ()) -> Resumption:
    """Return that of a window whose iterations have all been run again, but for those of the tail."""
    window = Namespace(records=states, num_replays=0) if len(states) > 1 or tail else None
    borders = Borders(ranks=frozenset({0}), player=BoundaryPlayer(0, {}), tail=tail)
    running: Any = Namespace(
        outcome=Namespace(record=states[-1], phases_s={"plan": 0.5}),
        take_replay=lambda: window,
        met=Namespace(live=Namespace(parameters=[])),
        borders=borders if tail else None,
        meet_before=lambda iteration: None,
        is_local=False,
    )
    return Resumption(MegatronLoop(), LoopState(), running, lambda iteration: None)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_data_begin_with_the_replay_which_is_due_once_and_the_loop_continues_from_its_last_record(
    args: Namespace,
) -> None:
    resumption = resumption_of(record_of(3), record_of(5))
    assert (args.iteration, args.consumed_train_samples) == (5, 24)
    resumption.begin_training(PARTS)
    assert args.consumed_train_samples == 40
    assert resumption.is_due
    args.iteration, args.consumed_train_samples = 3, 24
    num_replayed, phases_s = resumption.finish(None)
    assert (num_replayed, list(phases_s)) == (0, ["plan", "replay"])
    assert not resumption.is_due
    assert (args.iteration, args.consumed_train_samples) == (5, 40)


def test_random_numbers_are_restored_once(args: Namespace) -> None:
    resumption = resumption_of(record_of(5))
    expected = draw()
    draw()
    resumption.restore_rng()
    assert draw() == expected
    resumption.restore_rng()
    assert draw() != expected


def test_random_numbers_are_those_that_the_replay_has_reached(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumption = resumption_of(record_of(5), tail=(numbers_of(record_of(7)),))
    assert (args.iteration, args.consumed_train_samples) == (7, 40)
    resumption.begin_training(PARTS)
    assert args.consumed_train_samples == 56
    draw()
    reached = current_rng()
    monkeypatch.setattr(Replay, "run", lambda replay, parts: reached)
    expected = draw()
    resumption.finish(None)
    assert (args.iteration, args.consumed_train_samples) == (7, 56)
    resumption.restore_rng()
    assert draw() == expected
