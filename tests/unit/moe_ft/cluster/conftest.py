"""A clock of the coordinator that tests set forward."""

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the clock of the coordinator forward."""
    passed, now = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed[0])

    def add(seconds: float) -> None:
        passed[0] += seconds

    return add
