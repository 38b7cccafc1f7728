"""Real jobs that are struck from outside, at moments that seeds draw; `make chaos` runs them for an hour."""

import pytest

from tests.chaos.cases import SCENARIOS, draw_case
from tests.chaos.verdict import Verdict, run_case
from tests.namespaces import why_none
from tests.references import Place

# Two nodes are lost, and one comes back; ranks die while a repair replays; peers share the work of ranks.
SHORT = (2, 3, 4)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seed",
    [
        seed if seed in SHORT else pytest.param(seed, marks=pytest.mark.chaos)
        for seed in range(len(SCENARIOS))
    ],
)
def test_job_that_is_struck_from_outside_ends_like_an_undisturbed_one(
    seed: int, place: Place
) -> None:
    case = draw_case(seed, are_forks=True)
    if case.has_networks and (reason := why_none()):
        pytest.skip(reason)
    result = run_case(case, place)
    told = "\n".join([*result.problems, *result.notes])
    print(told)
    assert result.struck, told
    assert result.verdict in (Verdict.RIGHT, Verdict.RESTARTED), told
