"""Threads, locks, queues and clocks of Python's library in simulated processes."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from moe_ft.engine.persist import storage_lock
from tests.unit.simulation.simulated import Simulated


def test_event_wakes_a_thread_and_time_out_does_too(simulated: Simulated) -> None:
    def act() -> None:
        event = threading.Event()
        thread = threading.Thread(target=lambda: simulated.say(event.wait(5.0)))
        thread.start()
        time.sleep(1.0)
        event.set()
        thread.join()
        simulated.say(threading.Event().wait(5.0))

    simulated.process(act)
    simulated.run()
    assert [(round(now), what) for now, what in simulated.trace] == [(1, True), (6, False)]


def test_lock_is_held_by_one(simulated: Simulated) -> None:
    def act() -> None:
        lock = threading.Lock()
        with lock:
            thread = threading.Thread(target=lambda: simulated.say(lock.acquire(timeout=2.0)))
            thread.start()
            thread.join()
        simulated.say(lock.acquire(blocking=False))

    simulated.process(act)
    simulated.run()
    assert simulated.said == [False, True]


def test_reentrant_lock_is_taken_twice_by_its_owner_only(simulated: Simulated) -> None:
    def act() -> None:
        lock = threading.RLock()
        with lock, lock:
            thread = threading.Thread(target=lambda: simulated.say(lock.acquire(blocking=False)))
            thread.start()
            thread.join()

    simulated.process(act)
    simulated.run()
    assert simulated.said == [False]


def test_condition_waits_with_its_lock_released(simulated: Simulated) -> None:
    def act() -> None:
        condition = threading.Condition()
        items: list[int] = []

        def give() -> None:
            with condition:
                items.append(1)
                condition.notify()

        with condition:
            threading.Thread(target=give).start()
            simulated.say(condition.wait_for(lambda: items, timeout=5.0))

    simulated.process(act)
    simulated.run()
    assert simulated.said == [[1]]


@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue"])
def test_queue_hands_over_in_order_and_times_out(simulated: Simulated, kind: str) -> None:
    def act() -> None:
        items = getattr(queue, kind)()

        def put() -> None:
            for number in range(3):
                items.put(number)

        threading.Thread(target=put).start()
        simulated.say([items.get(timeout=1.0) for _ in range(3)])
        with pytest.raises(queue.Empty):
            items.get(timeout=1.0)
        with pytest.raises(queue.Empty):
            items.get_nowait()

    simulated.process(act)
    simulated.run()
    assert simulated.said == [[0, 1, 2]]


def test_pool_returns_results(simulated: Simulated) -> None:
    def act() -> None:
        pool = ThreadPoolExecutor(max_workers=2)
        simulated.say(sorted(pool.map(lambda number: number * 2, range(5))))

    simulated.process(act)
    simulated.run()
    assert simulated.said == [[0, 2, 4, 6, 8]]


def test_clocks_of_a_node_go_with_virtual_time(simulated: Simulated) -> None:
    def act() -> None:
        clocks = (time.monotonic, time.time, time.perf_counter)
        before = [clock() for clock in clocks]
        time.sleep(100.0)
        simulated.say([round(clock() - first) for clock, first in zip(clocks, before, strict=True)])

    simulated.process(act)
    simulated.run()
    assert simulated.said == [[100, 100, 100]]


def test_wall_clock_of_a_node_can_be_set(simulated: Simulated) -> None:
    def act() -> None:
        clock: type[datetime] = storage_lock.datetime
        before = clock.now(), time.time()
        simulated.world.clocks["node-a"].wall_s += 3600
        simulated.say((round((clock.now() - before[0]).seconds), round(time.time() - before[1])))

    simulated.process(act)
    simulated.run()
    assert simulated.said == [(3600, 3600)]


def test_threads_outside_are_real(simulated: Simulated) -> None:
    thread = threading.Thread(target=lambda: simulated.say(threading.get_ident()))
    thread.start()
    thread.join()
    assert simulated.said != [threading.get_ident()]
