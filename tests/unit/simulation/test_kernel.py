"""Virtual time, processes and threads: one runs at a time, and a seed decides which."""

import threading
import time

import pytest

from tests.simulation.kernel import HangError, Kernel
from tests.unit.simulation.simulated import Simulated


def test_code_of_a_killed_process_never_runs_again(simulated: Simulated) -> None:
    def act() -> None:
        try:
            simulated.kernel.event("first")
            simulated.say("first")
            simulated.kernel.event("second")
            simulated.say("second")
        finally:
            simulated.say("finally")

    process = simulated.process(act)
    process.at_death.append(lambda: simulated.say(process.exit_code))
    simulated.kernel.call_at_event(2, lambda what: simulated.kernel.kill(process))
    simulated.run()
    simulated.rest()
    assert simulated.said == ["first", -9]


def test_suspended_process_stands_still(simulated: Simulated) -> None:
    def act() -> None:
        for _ in range(4):
            simulated.kernel.sleep(1.0)
            simulated.say("step")

    process = simulated.process(act)
    simulated.later(1.5, lambda: simulated.kernel.suspend(process, 10.0))
    simulated.run()
    assert [round(now) for now, _ in simulated.trace] == [1, 12, 13, 14]


def test_other_threads_of_this_process_keep_their_clocks_and_locks(simulated: Simulated) -> None:
    asked, answers = threading.Event(), list[tuple[float, type]]()

    def act_outside() -> None:  # as the thread of an object store or of a progress bar
        asked.wait()
        answers.append((time.monotonic(), type(threading.Lock())))

    outside = threading.Thread(target=act_outside)
    outside.start()

    def act() -> None:
        simulated.kernel.sleep(1.0)
        asked.set()
        outside.join(60.0)

    before = time.monotonic()
    simulated.process(act)
    simulated.run()
    ((now, lock),) = answers
    assert before <= now <= time.monotonic()
    assert lock is type(threading.Lock())


def test_endless_loop_is_found() -> None:
    kernel = Kernel(1, max_events=1000)

    def turn() -> None:
        while True:
            kernel.event("turn")

    kernel.spawn(kernel.make_process("main", "node-a"), turn)
    with pytest.raises(HangError, match="turn in main@node-a:main"):
        kernel.run(lambda: False)
    kernel.close()
