"""Values of a parameter, some of which `make test` runs and `make test-all` the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def share_of[Value](
    values: Iterable[Value], *chosen: Value, versions: Sequence[Value] = ()
) -> list[Any]:
    """Return all values for pytest, those that were not chosen with the mark `rest`.

    Args:
        versions: those that other versions of Megatron also run.
    """
    known = list(values)
    assert all(each in known for each in (*chosen, *versions)), f"{chosen} are not all in {known}"
    found = []
    for value in known:
        marks = [] if value in chosen else [pytest.mark.rest]
        marks += [pytest.mark.versions] if value in versions else []
        found.append(pytest.param(value, marks=marks))
    return found
