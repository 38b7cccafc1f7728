"""Coverage of test ranks for `make coverage`, also of those that are killed."""

import os
import sys
import threading
import time
from contextlib import suppress

TEST = "PYTEST_CURRENT_TEST"  # set by pytest
_PAUSE_S = 1.0


def save_coverage_regularly() -> None:
    """Save the coverage of this process every second and before it kills itself, if it is measured.

    Coverage saves by itself when a process ends, which one that is killed does not do. The lines are noted
    under the name of the test.
    """
    coverage = sys.modules.get("coverage")
    if coverage is None or (measured := coverage.Coverage.current()) is None:
        return
    # It would forget what it has saved, and with it the lines that another thread runs at that moment.
    measured._collector._clear_data = lambda: None
    measured.get_data().set_context(os.environ.get(TEST, "").partition(" ")[0])
    kill, save, saving = os.kill, measured.save, threading.RLock()

    def save_alone() -> None:
        with saving:  # a thread must not write while another one, which ends the process, does
            save()

    measured.save = save_alone
    # A fork finds the lock free.
    os.register_at_fork(
        before=saving.acquire, after_in_parent=saving.release, after_in_child=saving.release
    )

    def save_and_kill(pid: int, number: int) -> None:
        if pid == os.getpid():
            measured.save()
        kill(pid, number)

    def save_again_and_again() -> None:
        with suppress(
            coverage.CoverageException
        ):  # a rank may become a user who may not write there
            while True:
                time.sleep(_PAUSE_S)
                measured.save()

    os.kill = save_and_kill
    threading.Thread(target=save_again_and_again, daemon=True).start()
