"""Faults of every kind in every phase, in many jobs: the final state is, bit for bit, that without them."""

import pytest

from tests.covering_array import Case, case_of, repaired_cases, runs
from tests.faulty_case import job_flags, run_case, run_repaired_case
from tests.harness import digests
from tests.references import Place
from tests.shares import share_of

CASES = [case_of(run) for run in runs("test")]
ALL = [*CASES, *(case_of(run) for run in runs("test-all"))]
# Of each strategy one with stages and experts; local multi-latent attention needs Megatron 0.19.
OF_VERSIONS = {
    each.family: each
    for each in reversed(ALL)
    if each.layout == "pp2-ep2" and each.model != "deepseek"
}


@pytest.mark.parametrize("case", share_of(ALL, *CASES, versions=[*OF_VERSIONS.values()]), ids=str)
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
