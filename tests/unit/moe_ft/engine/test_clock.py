"""The clock of the system."""

import threading

from moe_ft.engine.clock import Clock


def test_wait_returns_whether_the_event_was_set() -> None:
    event = threading.Event()
    assert not Clock().wait(event, 0.01)
    event.set()
    assert Clock().wait(event, 0.01)


def test_sleep_takes_as_long_as_both_kinds_of_seconds_say() -> None:
    clock = Clock()
    deadline_s, start_s = clock.monotonic() + 0.02, clock.perf_counter()
    clock.sleep(0.02)
    assert clock.monotonic() >= deadline_s
    assert clock.perf_counter() - start_s >= 0.019
