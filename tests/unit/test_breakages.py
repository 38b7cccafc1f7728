"""Breakages of recovery still find their targets; `make test-power` shows that tests notice them."""

import os

import pytest

from tests import power
from tests.breakages import BREAKAGES, NOTICED_BY


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


def test_tests_that_notice_breakages_are_known() -> None:
    assert {*power.TESTS} == {name for names in NOTICED_BY.values() for name in names}
