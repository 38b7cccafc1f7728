"""Fixtures of the tests under Megatron-Bridge, which run in .venv/bridge alone: `make test-bridge`."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# pyarrow, which Bridge imports, starts a thread otherwise, and ranks are forked. Set it before it is loaded.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

from tests import harness
from tests.bridge.jobs import PlainRuns, ReplacedJob, RestartedJob
from tests.references import Place

if find_spec("megatron.bridge") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    harness._context.set_forkserver_preload(["tests.warm", "tests.bridge.warm"])


@pytest.fixture
def place(shared_folder: Path, tmp_path: Path, memory_dir: Path) -> Place:
    """Return folders for jobs; their data are made up."""
    return Place([], tmp_path, memory_dir, PlainRuns(shared_folder / "plain"))


@pytest.fixture
def restarted(place: Place) -> RestartedJob:
    """Return a job whose ranks all start again after a death."""
    return RestartedJob(place)


@pytest.fixture
def replaced(place: Place) -> ReplacedJob:
    """Return a job whose dead ranks are replaced in place."""
    return ReplacedJob(place)
