"""Virtual time, processes and threads: one runs at a time, and a seed decides which."""

from typing import Any

import pytest

from tests.simulation.kernel import HangError, Kernel, Waiting
from tests.unit.simulation.simulated import Simulated


def test_time_passes_only_when_all_wait(simulated: Simulated) -> None:
    def sleep(seconds: float) -> None:
        simulated.kernel.sleep(seconds)
        simulated.say(seconds)

    for seconds in (30.0, 10.0, 20.0):
        simulated.process(lambda seconds=seconds: sleep(seconds))
    simulated.run()
    assert [(round(now), what) for now, what in simulated.trace] == [(10, 10), (20, 20), (30, 30)]


def test_who_is_woken_need_not_wait_for_the_timeout(simulated: Simulated) -> None:
    waiting = Waiting()

    def wait() -> None:
        simulated.say(simulated.kernel.wait(waiting, 5.0))
        simulated.say(simulated.kernel.wait(waiting, 5.0))

    simulated.process(wait)
    simulated.later(1.0, lambda: simulated.kernel.wake(waiting))
    simulated.run()
    assert [(round(now), what) for now, what in simulated.trace] == [(1, True), (6, False)]


def test_only_as_many_are_woken_as_was_said(simulated: Simulated) -> None:
    waiting = Waiting()
    for number in range(3):
        simulated.process(lambda n=number: simulated.say((n, simulated.kernel.wait(waiting, 9.0))))
    simulated.later(1.0, lambda: simulated.kernel.wake(waiting, 2))
    simulated.run()
    assert sorted(was_woken for _, was_woken in simulated.said) == [False, True, True]


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


def test_children_die_with_their_process(simulated: Simulated) -> None:
    parent = simulated.process(lambda: simulated.kernel.end(parent, 3))
    child = simulated.process(lambda: simulated.kernel.sleep(100.0))
    parent.children.append(child)
    simulated.run()
    assert (parent.exit_code, child.exit_code) == (3, -9)


def test_suspended_process_stands_still(simulated: Simulated) -> None:
    def act() -> None:
        for _ in range(4):
            simulated.kernel.sleep(1.0)
            simulated.say("step")

    process = simulated.process(act)
    simulated.later(1.5, lambda: simulated.kernel.suspend(process, 10.0))
    simulated.run()
    assert [round(now) for now, _ in simulated.trace] == [1, 12, 13, 14]


def test_threads_take_turns_at_events() -> None:
    orders = set()
    for seed in range(20):
        with Simulated(seed, switching=0.5) as simulated:

            def act(name: str, simulated: Simulated = simulated) -> None:
                for _ in range(3):
                    simulated.kernel.event("step")
                    simulated.say(name)

            simulated.process(lambda act=act: act("a"))
            simulated.process(lambda act=act: act("b"))
            simulated.run()
            orders.add("".join(simulated.said))
    assert len(orders) > 5


def test_error_of_a_thread_is_noted(simulated: Simulated) -> None:
    def fail() -> None:
        raise ValueError("broken")

    simulated.process(fail)
    with pytest.raises(ValueError, match="broken"):
        simulated.run()


def test_endless_loop_is_found() -> None:
    kernel = Kernel(1, max_events=1000)

    def turn() -> None:
        while True:
            kernel.event("turn")

    kernel.spawn(kernel.make_process("main", "node-a"), turn)
    with pytest.raises(HangError, match="turn in main@node-a:main"):
        kernel.run(lambda: False)
    kernel.close()


def test_those_who_wait_for_nothing_end_the_run(simulated: Simulated) -> None:
    simulated.process(lambda: simulated.kernel.wait(Waiting()))
    assert not simulated.kernel.run(lambda: False)


@pytest.mark.parametrize("seed", range(3))
def test_same_seed_makes_the_same_trace(seed: int) -> None:
    def trace() -> list[Any]:
        with Simulated(seed) as simulated:

            def act(name: str) -> None:
                for _ in range(50):
                    simulated.kernel.event("step")
                    simulated.say((name, simulated.kernel.random.random()))
                    simulated.kernel.sleep(simulated.kernel.random.random())

            for name in "abc":
                simulated.process(lambda name=name: act(name))
            simulated.run()
            return simulated.trace

    assert trace() == trace()
