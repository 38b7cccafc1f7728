"""After faults in runs with sparse windows the state is, bit for bit, that of a run without them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.covering import coverage, covering_array, first_runs
from tests.harness import digests
from tests.sparse_matrix import FACTORS, SparseCase, describe, reference_digests, run_case

ALL_CASES = [SparseCase(**values) for values in covering_array(FACTORS, num_tries=300)]
SOME_CASES = first_runs(ALL_CASES, 9, lambda case: case.values, lambda case: case.world_size)
Reference = Callable[[SparseCase], list[tuple[str, str]]]


@pytest.fixture(scope="session")
def reference(dataset_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return the digests of the run without faults; cases of the same job share it."""
    known: dict[tuple[str, ...], list[tuple[str, str]]] = {}

    def get(case: SparseCase) -> list[tuple[str, str]]:
        if case.job not in known:
            folder = tmp_path_factory.mktemp("reference")
            known[case.job] = reference_digests(case, dataset_flags, folder)
        return known[case.job]

    return get


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in SOME_CASES else pytest.mark.matrix)
        for case in ALL_CASES
    ],
    ids=str,
)
def test_run_with_windows_and_faults_ends_in_the_state_of_a_run_without(
    case: SparseCase,
    reference: Reference,
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
) -> None:
    recoveries = run_case(case, dataset_flags, tmp_path, memory_dir)
    print(describe(case, recoveries))
    assert digests(tmp_path / "events", case.world_size) == reference(case)


def test_covering_array_of_windows_holds_every_pair_in_at_most_60_runs() -> None:
    assert coverage([case.values for case in ALL_CASES], FACTORS) == 1
    assert len(ALL_CASES) <= 60
    some = coverage([case.values for case in SOME_CASES], FACTORS)
    print(f"{len(ALL_CASES)} runs hold all pairs, {len(SOME_CASES)} hold {some:.0%}")
