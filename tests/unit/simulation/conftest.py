"""A simulation for each test that wants one."""

from collections.abc import Iterator

import pytest

from tests.unit.simulation.simulated import Simulated


@pytest.fixture
def simulated() -> Iterator[Simulated]:
    with Simulated() as simulated:
        yield simulated
