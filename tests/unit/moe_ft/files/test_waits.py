"""Waits of a thread excuse it while they last and not for longer, and progress is that of one thread."""

import threading
import time

import pytest

from moe_ft.files.patience import excused_until_s, note_progress, progress_s, waiting


def test_wait_excuses_its_thread_up_to_its_limit_and_then_up_to_its_end() -> None:
    found: list[float] = []

    def look() -> None:
        found.append(excused_until_s(threading.get_ident()))

    def wait() -> None:
        look()
        with waiting(100.0):
            look()
            with pytest.raises(TimeoutError), waiting(10.0):
                raise TimeoutError
            look()
        look()

    begin_s = time.monotonic()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    before, within, outer, after = (each - begin_s for each in found)
    assert before < 0 and within >= 100 and outer == within
    assert 0 <= after < 100


def test_progress_is_that_of_the_thread_that_notes_it() -> None:
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(progress_s(threading.get_ident())))
    begin_s = time.monotonic()
    note_progress()
    thread.start()
    thread.join()
    assert begin_s <= progress_s(threading.get_ident()) <= time.monotonic()
    assert seen[0] < begin_s
