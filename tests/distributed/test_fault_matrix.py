"""Faults of every kind in every phase, on many layouts: the final state is that of a run without them."""

from pathlib import Path

import pytest

from tests.covering import coverage, covering_array, first_runs, parameters
from tests.distributed.conftest import Reference
from tests.fault_matrix import FACTORS, Case, job_flags, run_case
from tests.faulty_runs import describe
from tests.harness import digests

ALL_CASES = [Case(**values) for values in covering_array(FACTORS)]
SOME_CASES = first_runs(ALL_CASES, 12, lambda case: case.values, lambda case: case.world_size)


@pytest.mark.parametrize("case", parameters(ALL_CASES, SOME_CASES), ids=str)
def test_run_with_faults_recovers_and_ends_in_the_state_of_a_run_without(
    case: Case, reference: Reference, dataset_flags: list[str], tmp_path: Path, memory_dir: Path
) -> None:
    recovered = run_case(case, dataset_flags, tmp_path, memory_dir)
    print(describe(case, recovered))
    assert digests(tmp_path / "events", case.world_size) == reference(
        job_flags(case, dataset_flags), case.world_size
    )


def test_covering_array_holds_every_pair_in_at_most_60_runs() -> None:
    assert coverage([case.values for case in ALL_CASES], FACTORS) == 1
    assert len(ALL_CASES) <= 60
    some = coverage([case.values for case in SOME_CASES], FACTORS)
    print(f"{len(ALL_CASES)} runs hold all pairs, {len(SOME_CASES)} hold {some:.0%}")
