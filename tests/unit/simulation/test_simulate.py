"""Whole simulations: a seed repeats them event by event."""

from pathlib import Path

import pytest

from tests.simulation import soak
from tests.simulation.repairs.schedule import Fault, RepairSchedule
from tests.simulation.schedule import draw
from tests.simulation.simulate import installed, simulate


@pytest.mark.parametrize("seed", range(4))
def test_seed_gives_the_same_events_twice_in_one_process(seed: int) -> None:
    with installed():
        first, second = (simulate(draw(seed), Path("/dev/shm")) for _ in range(2))
    assert first.num_events > 0
    assert (first.trace, first.num_events) == (second.trace, second.num_events)


@pytest.mark.parametrize("repairs", [False, True])
@pytest.mark.parametrize("hang_limit", ["auto", "25"])
def test_job_of_which_all_ranks_hang_in_their_first_iteration_starts_again(
    hang_limit: str, repairs: bool
) -> None:
    """As seed 786035694401 of the repairs had it: nobody waits for another rank, so nobody times out."""
    fault = Fault(kind="hang-all", start=0, moment="forward", time=1)
    schedule = RepairSchedule(
        seed=1, ranks=2, hang_limit=hang_limit, repairs=repairs, faults=(fault,)
    )
    with installed():
        verdict = soak.attempt(schedule, Path("/dev/shm"))
    assert verdict.violations == ()
    assert verdict.num_starts == 2
    assert any("hangs in iteration 0, phase" in line for line in verdict.lines)
