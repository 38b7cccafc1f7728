"""A deadline for calls that may never return, such as those to a file system that does not answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from moe_ft.files.waits import waiting

PATIENCE_S = 30.0  # for one small operation
SLOWEST_BYTES_PER_S = 20e6  # a slower transfer counts as stuck


def call_within[Result](act: Callable[[], Result], patience_s: float, what: str) -> Result:
    """Return what a call returns, unless it takes too long.

    The call runs on a daemon thread. If it takes too long, the thread stays and may still act later.

    Args:
        act: is called once, and must not need the thread of the caller.
        patience_s: how long to wait.
        what: the operation, for the message.

    Raises:
        TimeoutError: if the call has not returned in time.
        BaseException: whatever the call raises.
    """
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="moe_ft-patience", daemon=True)
    with waiting(patience_s):
        thread.start()
        thread.join(patience_s)
    if not outcome.done():
        raise TimeoutError(f"{what} did not return within {patience_s:.0f} s")
    return outcome.result()
