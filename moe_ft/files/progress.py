"""Progress of threads, and their waits: for a disk until a deadline, for other ranks for as long as it takes.

A thread that watches another one cannot tell a wait from a hang otherwise. It also learns here whether a
thread that reads for long makes progress. Any thread may ask about any other.
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

PATIENCE_S = 30.0  # for one small operation
SLOWEST_BYTES_PER_S = 20e6  # a slower transfer counts as stuck
_NUM_LOOKS = 20  # a machine that stands still costs one
_ends_s: dict[int, list[float]] = {}  # of the waits that each thread is in
_left_s: dict[int, float] = {}  # when each thread left its last one
_progress_s: dict[int, float] = {}
_among_ranks = Counter[
    int
]()  # by thread, the contexts in which it waits for other processes of the job


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


@contextmanager
def awaiting_others() -> Iterator[None]:
    """Note that this thread waits for other processes of the job in this context, so it does not hang."""
    thread = threading.get_ident()
    _among_ranks[thread] += 1
    try:
        yield
    finally:
        _among_ranks[thread] -= 1


def awaits_others(thread: int) -> bool:
    """Return whether a thread is in such a context."""
    return _among_ranks[thread] > 0


def excused_until_s(thread: int) -> float:
    """Return the time, of the monotonic clock, until which a thread was or may be in such a wait."""
    return max(_left_s.get(thread, 0.0), *_ends_s.get(thread, ()), 0.0)


def note_progress() -> None:
    """Note that this thread, which others may wait for, has got further."""
    _progress_s[threading.get_ident()] = time.monotonic()


def progress_s(thread: int) -> float:
    """Return when a thread last got further, by the monotonic clock; 0 if it never has."""
    return _progress_s.get(thread, 0.0)


def call_within[Result](act: Callable[[], Result], patience_s: float, what: str) -> Result:
    """Return what a call returns, unless it takes too long.

    The call runs on a daemon thread. If it takes too long, the thread stays and may still act later. Time in
    which this process or its machine stood still is no fault of what is called, and hardly counts.

    Args:
        act: must not need the thread of the caller.
        what: the operation, for the message.

    Raises:
        OSError: at once, on a thread that serves storage: a finalizer there would wait for itself.
        TimeoutError: if the call has not returned in time.
        BaseException: whatever the call raises.
    """
    if _serves_storage():
        raise OSError(f"{what} is asked for by the thread that is to serve it")
    outcome: Future[Result] = Future()
    thread = threading.Thread(target=_run, args=(act, outcome), name="moe_ft-patience", daemon=True)
    with waiting(patience_s):
        thread.start()
        for _ in range(_NUM_LOOKS):
            thread.join(patience_s / _NUM_LOOKS)
            if not thread.is_alive():
                break
    if not outcome.done():
        raise TimeoutError(f"{what} did not return within {patience_s:.0f} s")
    try:
        return outcome.result()
    finally:
        del outcome  # its error leads to this frame and to those of all callers: see `_run`


def _serves_storage() -> bool:
    """Return whether this is the thread on which fsspec makes the requests of all object stores."""
    fsspec = sys.modules.get("fsspec.asyn")
    return fsspec is not None and fsspec.iothread[0] is threading.current_thread()


def _run[Result](act: Callable[[], Result], outcome: Future[Result]) -> None:
    try:
        outcome.set_result(act())
    except BaseException as error:
        outcome.set_exception(error)
    finally:
        # Else what callers hold would live until a collection, which may be on a thread that its end needs.
        del outcome
