"""Waiting for another thread or process; the deadline fails the test."""

import time
from collections.abc import Callable

_DEADLINE_S = 30.0
_POLL_S = 0.005


def wait_for[Found](find: Callable[[], Found | None], what: str) -> Found:
    """Return the first result that is neither None nor false; fail the test after 30 s."""
    deadline = time.monotonic() + _DEADLINE_S
    while not (found := find()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(_POLL_S)
    return found
