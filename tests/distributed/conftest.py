"""Fixtures of the tests that run jobs with checkpoints."""

from pathlib import Path

import pytest

from tests.jobs import CheckpointJob, RepairedJob
from tests.references import Digests, Place, References
from tests.settled import SETTLED


@pytest.fixture(scope="session")
def references(shared_folder: Path) -> References:
    """Return the digests of undisturbed runs."""
    return References(shared_folder / "references")


@pytest.fixture
def place(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, references: References
) -> Place:
    """Return data and folders for jobs."""
    return Place(dataset_flags, tmp_path, memory_dir, references)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks finish the background work of each iteration before the next one."""
    monkeypatch.setenv(SETTLED, "1")


@pytest.fixture
def job(place: Place) -> CheckpointJob:
    return CheckpointJob(place)


@pytest.fixture
def expected(job: CheckpointJob) -> Digests:
    """Return the digests of the job's ranks when it takes no checkpoints and nothing fails."""
    return job.reference()


@pytest.fixture
def repaired(place: Place) -> RepairedJob:
    """Return a job whose dead ranks are replaced in place."""
    return RepairedJob(place)
