"""Fixtures of the tests that run jobs with checkpoints."""

from pathlib import Path

import pytest

from tests.covering_array import SPACE, case_of, runs
from tests.jobs import CheckpointJob, RepairedJob
from tests.references import Digests, Place, References

RECOVERIES = "recoveries"  # property of a test: a line that says what its run has recovered


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the runs of the covering array that have passed recovered, and the pairs that they show."""
    properties = [
        found
        for report in terminalreporter.getreports("passed")
        for found in report.user_properties
    ]
    lines = [str(value) for name, value in properties if name == RECOVERIES]
    if lines:
        terminalreporter.section(f"recoveries of {len(lines)} runs of the covering array")
        terminalreporter.write_line("\n".join(sorted(lines)))
        names = {line.partition(":")[0] for line in lines}
        shown = SPACE.shown_by(run for run in runs() if str(case_of(run)) in names)
        count = f"{len(shown)} of {len(SPACE.examples)}"
        terminalreporter.write_line(f"they show {count} pairs of circumstances")


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
