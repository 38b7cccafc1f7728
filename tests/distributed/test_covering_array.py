"""Faults of every kind in every phase, in many jobs: the final state is, bit for bit, that without them."""

import pytest

from tests.covering_array import Case, case_of, repaired_cases, runs
from tests.faulty_case import job_flags, run_case, run_repaired_case
from tests.harness import digests
from tests.references import Place

CASES = [case_of(run) for run in runs("test")]
REST = [pytest.param(case_of(run), marks=pytest.mark.rest) for run in runs("test-all")]


@pytest.mark.parametrize("case", [*CASES, *REST], ids=str)
def test_run_with_faults_recovers_and_ends_in_the_state_of_a_run_without(
    case: Case, place: Place
) -> None:
    run_case(case, place)
    if case.is_exact:
        check_end(case, place)


@pytest.mark.rest
@pytest.mark.parametrize("case", repaired_cases(), ids=str)
def test_run_whose_dead_ranks_are_replaced_ends_in_the_state_of_a_run_without_faults(
    case: Case, place: Place
) -> None:
    run_repaired_case(case, place)
    check_end(case, place)


def check_end(case: Case, place: Place) -> None:
    wanted = place.references.digests(job_flags(case, place), case.world_size)
    assert digests(place.folder / "events", case.world_size) == wanted
