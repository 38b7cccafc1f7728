"""Directories and users for tests of commands."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.unit.moe_ft.commands.bad_input import become_nobody


@pytest.fixture(scope="module")
def nobody_process() -> Iterator[ProcessPoolExecutor]:
    """Yield a process of another user, in which a command can be run."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork, initializer=become_nobody) as process:
        yield process


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty directory, the current one, that every user can look into, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        monkeypatch.chdir(name)
        yield Path(name)


@pytest.fixture
def nobody(request: pytest.FixtureRequest) -> Callable[[], ProcessPoolExecutor]:
    """Return a function that returns the process of another user, started when it is needed."""
    return lambda: request.getfixturevalue("nobody_process")
