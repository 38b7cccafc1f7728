"""Deadline of a repair: a process that misses it ends, and the launcher restarts the job."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moe_ft.keeper.link import Link
from moe_ft.recovery.site import say


@contextmanager
def ending_after(seconds: float, link: Link) -> Iterator[None]:
    """End the process, for good, if this context takes longer.

    Args:
        seconds: the deadline.
        link: to the zygote, which would replace the process.
    """

    def leave() -> None:
        link.retire()
        say(f"a repair has taken {seconds:.0f} s: this rank ends")
        sys.stdout.flush()
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
