"""A loop that counts and evaluates nothing needs to say nothing about it."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from megatron.fault_tolerance.custom.facts import RunFacts
from megatron.fault_tolerance.custom.loop import CustomLoop
from moe_ft.loop.training_loop import state_places


@pytest.fixture
def loop() -> CustomLoop:
    run = RunFacts(settings={}, train_iterations=4, samples_per_iteration=8, sequence_length=32)
    return CustomLoop(run, Namespace(num_experts=0), None)


def test_loop_that_says_nothing_has_no_evaluation_operations_or_other_run(loop: CustomLoop) -> None:
    assert not any(loop.is_used(iteration) or loop.is_logged(iteration) for iteration in range(10))
    assert loop.num_operations_so_far() == loop.num_operations_of(8) == 0.0
    assert loop.began_with() == ""


def test_places_are_those_in_the_groups_that_divide_state() -> None:
    def group(rank: int) -> SimpleNamespace:
        return SimpleNamespace(rank=lambda: rank, size=lambda: 10 + rank)

    groups = SimpleNamespace(dp_cp=group(1), expt_dp=group(2), tp=group(3), expt_tp=group(4))
    places = state_places(groups)
    found = [(each.rank, each.size) for each in (places.dp, places.expt_dp, places.tp)]
    assert found == [(1, 11), (2, 12), (3, 13)]
    assert (places.expt_tp.rank, places.expt_tp.size) == (4, 14)
