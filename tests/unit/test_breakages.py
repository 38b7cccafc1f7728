"""Breakages of recovery still find their targets; `make test-power` shows that tests notice them."""

import os

import pytest

from tests.breakages import BREAKAGES


@pytest.mark.parametrize("name", BREAKAGES)
def test_breakage_finds_what_it_breaks(name: str) -> None:
    if (child := os.fork()) == 0:  # this process stays whole
        code = 1
        try:
            BREAKAGES[name]()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0
