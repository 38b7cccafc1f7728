"""Jobs of engines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.moe_ft.engine.engine_job import Job, MakeJob, Setup


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[MakeJob]:
    """Return what makes jobs, each with a folder of its own."""
    jobs: list[Job] = []

    def make(**settings: Any) -> Job:
        jobs.append(Job(tmp_path / str(len(jobs)), Setup(**settings)))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
