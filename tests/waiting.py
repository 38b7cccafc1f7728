"""Waiting for another thread or process; the deadline fails the test."""

import time
from collections.abc import Callable

_DEADLINE_S = 120.0  # a machine may be busy with other things
_POLL_S = 0.005


def wait_for[Found](
    find: Callable[[], Found | None],
    what: str,
    deadline_s: float = _DEADLINE_S,
    poll_s: float = _POLL_S,
) -> Found:
    """Return the first result that is neither None nor false; fail the test after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not (found := find()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(poll_s)
    return found
