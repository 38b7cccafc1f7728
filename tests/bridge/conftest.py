"""Fixtures of the tests under Megatron-Bridge, which run in .venv/bridge alone: `make test-bridge`."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# pyarrow, which Bridge imports, starts a thread otherwise, and ranks are forked. Set it before it is loaded.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

from tests import harness
from tests.bridge.jobs import PlainRuns

if find_spec("megatron.bridge") is None:
    collect_ignore_glob = ["test_*.py"]

harness._context.set_forkserver_preload(["tests.warm", "tests.bridge.warm"])


@pytest.fixture
def plain_runs(shared_folder: Path) -> PlainRuns:
    return PlainRuns(shared_folder / "plain")
