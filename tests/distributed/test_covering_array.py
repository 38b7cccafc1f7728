"""Faults of every kind in every phase, in many jobs: the final state is, bit for bit, that without them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.covering_array import Case, case_of, repaired_cases, runs
from tests.distributed.conftest import RECOVERIES
from tests.faulty_case import job_flags, run_case, run_repaired_case
from tests.faulty_runs import describe
from tests.harness import digests
from tests.references import References

CASES = [case_of(run) for run in runs("test")]
REST = [pytest.param(case_of(run), marks=pytest.mark.rest) for run in runs("test-all")]


@pytest.mark.parametrize("case", [*CASES, *REST], ids=str)
def test_run_with_faults_recovers_and_ends_in_the_state_of_a_run_without(
    case: Case,
    references: References,
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    record_property: Callable[[str, object], None],
) -> None:
    recovered = run_case(case, dataset_flags, tmp_path, memory_dir)
    record_property(RECOVERIES, describe(case, recovered))
    if case.is_exact:
        wanted = references.digests(job_flags(case, dataset_flags), case.world_size)
        assert digests(tmp_path / "events", case.world_size) == wanted


@pytest.mark.rest
@pytest.mark.parametrize("case", repaired_cases(), ids=str)
def test_run_whose_dead_ranks_are_replaced_ends_in_the_state_of_a_run_without_faults(
    case: Case,
    references: References,
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
) -> None:
    run_repaired_case(case, dataset_flags, tmp_path, memory_dir)
    wanted = references.digests(job_flags(case, dataset_flags), case.world_size)
    assert digests(tmp_path / "events", case.world_size) == wanted
