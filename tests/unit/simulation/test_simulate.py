"""Whole simulations: a seed repeats them event by event."""

from pathlib import Path

import pytest

from tests.simulation.schedule import draw
from tests.simulation.simulate import installed, simulate


@pytest.mark.parametrize("seed", range(4))
def test_seed_gives_the_same_events_twice_in_one_process(seed: int) -> None:
    with installed():
        first, second = (simulate(draw(seed), Path("/dev/shm")) for _ in range(2))
    assert first.num_events > 0
    assert (first.trace, first.num_events) == (second.trace, second.num_events)
