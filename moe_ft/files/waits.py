"""Waits of a thread that no other rank explains, such as for a disk: who has them says so, and for how long.

A thread that watches another one cannot tell them from a hang otherwise. It also learns here whether a thread
that reads for long gets further. Any thread may ask about any other.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_ends_s: dict[int, list[float]] = {}  # of the waits that each thread is in
_left_s: dict[int, float] = {}  # when each thread left its last one
_progress_s: dict[int, float] = {}


@contextmanager
def waiting(limit_s: float) -> Iterator[None]:
    """Note that this thread waits in this context for something that it gets in so many seconds, or never."""
    thread = threading.get_ident()
    ends_s = _ends_s.setdefault(thread, [])
    ends_s.append(time.monotonic() + limit_s)
    try:
        yield
    finally:
        _left_s[thread] = time.monotonic()
        ends_s.pop()


def excused_until_s(thread: int) -> float:
    """Return the time, of the monotonic clock, until which a thread was or may be in such a wait."""
    return max(_left_s.get(thread, 0.0), *_ends_s.get(thread, ()), 0.0)


def note_progress() -> None:
    """Note that this thread, which others may wait for, has got further."""
    _progress_s[threading.get_ident()] = time.monotonic()


def progress_s(thread: int) -> float:
    """Return when a thread last got further, by the monotonic clock; 0 if it never has."""
    return _progress_s.get(thread, 0.0)
