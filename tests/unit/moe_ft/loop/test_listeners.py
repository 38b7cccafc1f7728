"""Listeners are called in their order at every seam, and closed in the opposite order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_ft.faults import Phase
from moe_ft.loop.listeners import (
    Built,
    EndedIteration,
    Listeners,
    LoopListener,
    LoopState,
    Repair,
)


class Recorder(LoopListener):
    """A listener that keeps what it is told, by name, and what the loop was like then."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], loop: LoopState) -> None:
        self.name, self.calls, self.loop = name, calls, loop
        self.fails_in: set[str] = set()
        self.stall_s = 0.0

    def _note(self, seam: str, *values: Any) -> None:
        self.calls.append((seam, self.name, *values))
        if seam in self.fails_in:
            raise ZeroDivisionError(f"{seam} of {self.name}")

    def after_setup(self, built: Built) -> None:
        """Note it."""
        self._note("after_setup", self.loop.iteration)
        self.loop.iteration = 7  # as a recovery does

    def after_recovery(self) -> None:
        """Note it."""
        self._note("after_recovery", self.loop.iteration)

    def before_batch(self) -> None:
        """Note it."""
        self._note("before_batch", self.loop.iteration, self.loop.grad_norm)

    def begin_iteration(self) -> None:
        """Note it."""
        self._note("begin_iteration", self.loop.iteration, self.loop.grad_norm)

    def waits_for(self, iteration: int, phase: Phase) -> bool:
        """Wait in one phase of one iteration."""
        return self.name == "b" and (iteration, phase) == (4, Phase.IN_STEP)

    def enter_phase(self, iteration: int, phase: Phase) -> None:
        """Note it."""
        self._note("enter_phase", iteration, phase)

    def before_step(self) -> None:
        """Note it."""
        self._note("before_step")

    def end_iteration(self, ended: EndedIteration) -> None:
        """Note it."""
        self._note("end_iteration", ended.iteration)
        self.loop.stall_s += self.stall_s

    def after_iteration(self, ended: EndedIteration) -> None:
        """Note it."""
        self._note("after_iteration", self.loop.stall_s)

    def suspend(self, iteration: int) -> None:
        """Note it."""
        self._note("suspend", iteration, self.loop.is_torn)

    def after_repair(self, repair: Repair) -> None:
        """Note it."""
        self._note("after_repair", repair.number)

    def end_training(self) -> None:
        """Note it."""
        self._note("end_training")

    def after_training(self) -> None:
        """Note it."""
        self._note("after_training")

    def failed(self, error: Exception) -> None:
        """Note it."""
        self._note("failed", str(error))

    def close(self) -> None:
        """Note it."""
        self._note("close")


class Run:
    """Two recorders and what they were told."""

    def __init__(self) -> None:
        self.loop, self.calls = LoopState(), list[tuple[Any, ...]]()
        self.a, self.b = (Recorder(name, self.calls, self.loop) for name in "ab")
        self.listeners = Listeners(self.loop, [self.a, self.b])

    def of(self, act: Callable[[Listeners], object]) -> list[tuple[Any, ...]]:
        """Return the calls that something leads to."""
        self.calls.clear()
        act(self.listeners)
        return list(self.calls)

    def end_iteration(self) -> list[tuple[Any, ...]]:
        """End an iteration of 8 samples."""
        return self.of(
            lambda each: each.end_iteration(
                {"lm loss": torch.ones(1)}, is_skipped=False, num_samples=8
            )
        )


@pytest.fixture
def run() -> Run:
    return Run()


def test_all_recover_before_any_reads_the_recovered_counters(run: Run) -> None:
    assert run.of(lambda each: each.after_setup(([], None, None), 5)) == [
        ("after_setup", "a", 5),
        ("after_setup", "b", 7),
        ("after_recovery", "a", 7),
        ("after_recovery", "b", 7),
    ]


def test_iteration_begins_after_the_last_state_was_acted_on(run: Run) -> None:
    run.loop.iteration, run.loop.grad_norm = 4, 1.5
    assert run.of(lambda each: each.begin_iteration(5)) == [
        ("before_batch", "a", 4, 1.5),
        ("before_batch", "b", 4, 1.5),
        ("begin_iteration", "a", 5, None),
        ("begin_iteration", "b", 5, None),
    ]
    assert run.loop.is_in_iteration


def test_iteration_that_was_broken_off_leaves_nothing_in_the_state_of_the_loop(run: Run) -> None:
    loop = run.loop
    loop.is_torn = loop.is_replaying = loop.is_in_iteration = True
    loop.phase, loop.grad_norm = Phase.IN_STEP, 1.5
    assert run.of(lambda each: each.suspend(5)) == [
        ("suspend", "b", 5, True),
        ("suspend", "a", 5, True),
    ]
    assert loop == LoopState()


def test_repair_is_reported_to_all(run: Run) -> None:
    repair = Repair(
        number=2,
        iteration=5,
        recovered=4,
        dead=(1,),
        hung_s={},
        is_replacement=False,
        phases_s={},
    )
    assert run.of(lambda each: each.after_repair(repair)) == [
        ("after_repair", "a", 2),
        ("after_repair", "b", 2),
    ]


def test_batch_that_is_skipped_begins_no_iteration(run: Run) -> None:
    run.of(lambda each: each.before_batch())
    assert {seam for seam, *_ in run.calls} == {"before_batch"}
    assert not run.loop.is_in_iteration


def test_gradients_are_ready_in_a_phase_of_their_own(run: Run) -> None:
    run.loop.iteration = 3
    assert run.of(lambda each: each.before_step()) == [
        ("enter_phase", "a", 3, Phase.BEFORE_STEP),
        ("enter_phase", "b", 3, Phase.BEFORE_STEP),
        ("before_step", "a"),
        ("before_step", "b"),
    ]
    assert run.loop.phase is Phase.BEFORE_STEP


def test_iteration_is_reported_after_all_have_acted_on_its_state(run: Run) -> None:
    run.listeners.begin_iteration(4)
    run.b.stall_s = 0.5
    assert run.end_iteration() == [
        ("enter_phase", "a", 4, Phase.BETWEEN),
        ("enter_phase", "b", 4, Phase.BETWEEN),
        ("end_iteration", "a", 5),
        ("end_iteration", "b", 5),
        ("after_iteration", "a", 0.5),
        ("after_iteration", "b", 0.5),
    ]
    assert not run.loop.is_in_iteration


def test_stall_of_an_iteration_is_reported_once(run: Run) -> None:
    run.b.stall_s = 0.5
    run.end_iteration()
    run.b.stall_s = 0.0
    run.loop.stall_s += 0.25  # of a state that was evaluated first
    assert ("after_iteration", "a", 0.25) in run.end_iteration()


def test_last_state_is_reported_after_all_have_acted_on_it(run: Run) -> None:
    assert run.of(lambda each: each.end_training()) == [
        ("end_training", "a"),
        ("end_training", "b"),
        ("after_training", "a"),
        ("after_training", "b"),
    ]


def test_phase_is_awaited_if_any_listener_waits_for_it(run: Run) -> None:
    run.loop.iteration = 4
    assert run.listeners.is_awaited(Phase.IN_STEP)
    assert not run.listeners.is_awaited(Phase.FORWARD)
    run.loop.iteration = 5
    assert not run.listeners.is_awaited(Phase.IN_STEP)


def test_exception_in_a_phase_reaches_the_loop(run: Run) -> None:
    run.a.fails_in = {"enter_phase"}
    with pytest.raises(ZeroDivisionError):
        run.listeners.enter(Phase.FORWARD)
    assert run.loop.phase is Phase.FORWARD


def test_listeners_are_closed_backwards_also_when_one_fails(run: Run) -> None:
    run.b.fails_in = {"close"}
    with pytest.raises(ZeroDivisionError, match="close of b"), run.listeners:
        pass
    assert run.calls == [("close", "b"), ("close", "a")]


def test_listeners_are_closed_after_an_exception_which_passes(run: Run) -> None:
    with pytest.raises(KeyError, match="lost"), run.listeners:
        raise KeyError("lost")
    assert run.calls == [("close", "b"), ("close", "a")]


def test_failure_is_told_to_all_also_when_one_fails(run: Run) -> None:
    run.a.fails_in = {"failed"}
    with pytest.raises(ZeroDivisionError, match="failed of a"):
        run.listeners.failed(KeyError("lost"))
    assert run.calls == [("failed", "a", "'lost'"), ("failed", "b", "'lost'")]


def test_listener_does_nothing_by_default() -> None:
    loop = LoopState()
    with Listeners(loop, [LoopListener()]) as listeners:
        listeners.before_setup()
        listeners.after_setup(([], None, None), 2)
        listeners.replay_if_due()
        listeners.begin_iteration(2)
        listeners.begin_attempt()
        listeners.before_step()
        assert not listeners.is_awaited(Phase.IN_STEP)
        listeners.end_iteration({}, is_skipped=True, num_samples=8)
        listeners.end_training()
        listeners.end("finished")
        listeners.failed(KeyError())
    assert loop == LoopState(iteration=3, phase=Phase.BETWEEN)
