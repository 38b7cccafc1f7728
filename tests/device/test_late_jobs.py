"""Simulated jobs on late devices, and the proof that each wait of the product is needed there."""

import pytest
import torch

from tests.device.removal import FENCE, check, hunt, schedules, waits
from tests.simulation.schedule import draw

SEEDS = range(4)
NUM_DRAWN, NUM_MORE = 20, 200


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_chosen_jobs_wait_for_all_that_they_need() -> None:
    for schedule in schedules(SEEDS):
        assert check(schedule) == [], schedule


@pytest.mark.parametrize(
    "seeds",
    [
        range(NUM_DRAWN),
        pytest.param(range(NUM_DRAWN, NUM_DRAWN + NUM_MORE), marks=pytest.mark.rest),
    ],
    ids=["some", "many"],
)
def test_drawn_jobs_on_late_devices_break_no_promise(seeds: range) -> None:
    for seed in seeds:
        assert check(draw(seed)) == [], seed


@pytest.mark.parametrize("name", [*waits(), FENCE])
def test_wait_that_is_left_out_is_noticed(name: str) -> None:
    found = hunt(name, SEEDS)
    assert found.num_left_out > 0
    assert found.problem
