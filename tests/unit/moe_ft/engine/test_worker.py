"""The clock, and the worker with a thread: order, results, idle work, and its end."""

import threading
from collections.abc import Iterator

import pytest

from moe_ft.engine.background import ThreadWorker
from moe_ft.engine.clock import Clock
from tests.waiting import wait_for

DEADLINE_S = 120.0


@pytest.fixture
def worker() -> Iterator[ThreadWorker]:
    worker = ThreadWorker("test")
    worker.start()
    yield worker
    worker.close(DEADLINE_S)


def test_work_is_done_in_the_order_of_its_submission(worker: ThreadWorker) -> None:
    done: list[int] = []
    futures = [worker.submit(lambda each=each: done.append(each)) for each in range(20)]
    futures[-1].result(DEADLINE_S)
    assert done == list(range(20))


def test_result_and_exception_are_those_of_the_work(worker: ThreadWorker) -> None:
    assert worker.submit(lambda: 7).result(DEADLINE_S) == 7
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(DEADLINE_S)
    assert worker.submit(lambda: 8).result(DEADLINE_S) == 8


def test_work_runs_on_one_thread_with_the_name_of_the_worker(worker: ThreadWorker) -> None:
    names = {worker.submit(lambda: threading.current_thread().name).result() for _ in range(3)}
    assert names == {"moe_ft-test"}


def test_idle_work_is_done_when_nothing_else_comes(worker: ThreadWorker) -> None:
    done = threading.Event()
    worker.submit(lambda: worker.when_idle(0.01, done.set))
    assert done.wait(DEADLINE_S)


def test_idle_work_may_ask_for_more_of_it(worker: ThreadWorker) -> None:
    done: list[None] = []

    def again() -> None:
        done.append(None)
        worker.when_idle(0.01, again)

    worker.submit(again)
    wait_for(lambda: len(done) > 3, "idle work to be repeated")


def test_idle_work_is_forgotten_when_something_else_comes(worker: ThreadWorker) -> None:
    may_go_on, done = threading.Event(), list[str]()

    def ask() -> None:
        worker.when_idle(0.01, lambda: done.append("idle"))
        may_go_on.wait(DEADLINE_S)

    worker.submit(ask)
    last = worker.submit(lambda: done.append("work"))
    may_go_on.set()
    last.result(DEADLINE_S)
    worker.close(DEADLINE_S)
    assert done == ["work"]


def test_worker_that_is_closed_has_done_everything(worker: ThreadWorker) -> None:
    done: list[int] = []
    for each in range(20):
        worker.submit(lambda each=each: done.append(each))
    worker.close(DEADLINE_S)
    assert done == list(range(20))


def test_worker_that_hangs_is_left_after_the_timeout_and_its_work_stays_undone() -> None:
    worker, may_end = ThreadWorker("test"), threading.Event()
    worker.start()
    stuck = worker.submit(lambda: may_end.wait(DEADLINE_S))
    worker.close(0.01)
    assert not stuck.done()
    may_end.set()
    assert stuck.result(DEADLINE_S)


def test_worker_that_was_never_started_can_be_closed() -> None:
    ThreadWorker("test").close(DEADLINE_S)


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
