"""Processes that a test did not start itself."""

import os
from collections.abc import Iterable
from contextlib import suppress

import psutil

from moe_ft.processes import has_ended
from tests.waiting import wait_for


def wait_until_group_is_gone(group: int) -> None:
    """Wait until no process of a process group is left; fail the test after a while."""
    wait_for(lambda: not _is_alive(group), f"the end of group {group}")


def is_running(pid: int) -> bool:
    """Return whether a process runs; a dead one may still wait for its parent to notice."""
    return not has_ended(pid)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes so that none acts on the end of another; wait until they are gone.

    The youngest go first: what is stopped when its parent ends would be woken by the kernel.
    """
    found = sorted(processes, key=lambda process: -process.create_time())
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in found:
            with suppress(psutil.NoSuchProcess):
                act(process)
    psutil.wait_procs(found, timeout=30)
