"""Deadline of a repair: a process that gets no further ends, and the launcher restarts the job."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moe_ft.files.patience import progress_s
from moe_ft.keeper.link import Link
from moe_ft.saying import say


@contextmanager
def ending_after(seconds: float, link: Link) -> Iterator[None]:
    """End the process, for good, if this context takes longer without any progress of this thread.

    Args:
        seconds: from the beginning, or from the last progress (moe_ft/files/patience.py).
        link: to the zygote, which would replace the process.
    """
    begin_s, thread, has_ended = time.monotonic(), threading.get_ident(), threading.Event()

    def watch() -> None:
        wait_s = seconds
        while not has_ended.wait(wait_s):
            wait_s = max(begin_s, progress_s(thread)) + seconds - time.monotonic()
            if wait_s <= 0:
                link.retire()
                say(f"a repair has made no progress for {seconds:.0f} s: this rank ends")
                sys.stdout.flush()
                os._exit(1)

    watching = threading.Thread(target=watch, name="moe_ft-deadline", daemon=True)
    watching.start()
    try:
        yield
    finally:
        has_ended.set()
        watching.join()
