"""Values of a parameter, some of which `make test` runs and `make test-all` the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def share_of[Value](values: Iterable[Value], *chosen: Value) -> list[Any]:
    """Return all values for pytest, those that were not chosen with the mark `rest`."""
    known = list(values)
    assert all(each in known for each in chosen), f"{chosen} are not all in {known}"
    return [pytest.param(each, marks=() if each in chosen else pytest.mark.rest) for each in known]
