"""Waiting for processes that a test did not start itself."""

import os
import time

from moe_ft.processes import has_ended

_DEADLINE_S = 120


def wait_until_group_is_gone(group: int) -> None:
    """Wait until no process of a process group is left; fail the test after a while."""
    deadline = time.monotonic() + _DEADLINE_S
    while _is_alive(group):
        assert time.monotonic() < deadline, f"a process of group {group} is still there"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Return whether a process runs; a dead one may still wait for its parent to notice."""
    return not has_ended(pid)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
