"""Listeners are called in their order at every seam, and closed in the opposite order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_ft.faults import Phase
from moe_ft.loop.listeners import Listeners, LoopListener, LoopState

SEAMS = (
    *("after_setup", "after_recovery", "before_batch", "begin_iteration", "enter_phase"),
    *("before_step", "begin_update", "end_iteration", "after_iteration", "suspend"),
    *("failed", "close"),
)
SEEN = {  # of the loop, by seam
    "before_batch": ("iteration", "grad_norm"),
    "begin_iteration": ("iteration", "grad_norm"),
    "begin_update": ("is_torn",),
    "after_iteration": ("stall_s",),
    "suspend": ("is_torn",),
    **dict.fromkeys(("after_setup", "after_recovery", "end_iteration"), ("iteration",)),
}


class _Recorder(LoopListener):
    """Keeps the seams that it passes, by name, and what the loop was like there."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], loop: LoopState) -> None:
        self.name, self.calls, self.loop = name, calls, loop
        self.fails_in, self.stall_s = "", 0.0
        for seam in SEAMS:
            setattr(self, seam, lambda *given, seam=seam: self._note(seam, *given))

    def _note(self, seam: str, *given: Any) -> None:
        seen = [getattr(self.loop, name) for name in SEEN.get(seam, ())]
        told = given if seam in ("enter_phase", "failed") else ()
        self.calls.append((seam, self.name, *map(str, told), *seen))
        if seam == "after_setup":
            self.loop.iteration = 7  # as a recovery does
        if seam == "end_iteration":
            self.loop.stall_s += self.stall_s
        if seam == self.fails_in:
            raise ZeroDivisionError(f"{seam} of {self.name}")


class Run:
    """Two recorders and what they were told."""

    def __init__(self) -> None:
        self.loop, self.calls = LoopState(), list[tuple[Any, ...]]()
        self.a, self.b = (_Recorder(name, self.calls, self.loop) for name in "ab")
        self.listeners = Listeners(self.loop, [self.a, self.b])

    def of(self, act: Callable[[Listeners], object]) -> list[tuple[Any, ...]]:
        """Return the calls that something leads to."""
        self.calls.clear()
        act(self.listeners)
        return list(self.calls)

    def end_iteration(self) -> list[tuple[Any, ...]]:
        """End an iteration of 8 samples."""
        losses = {"lm loss": torch.ones(1)}
        return self.of(lambda each: each.end_iteration(losses, is_skipped=False, num_samples=8))


@pytest.fixture
def run() -> Run:
    return Run()


def by_both(*seams: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return each seam as both listeners note it, one after the other."""
    return [(seam, name, *seen) for seam, *seen in seams for name in "ab"]


def test_all_recover_before_any_reads_the_recovered_counters(run: Run) -> None:
    assert run.of(lambda each: each.after_setup(([], None, None), 5)) == [
        ("after_setup", "a", 5),
        ("after_setup", "b", 7),
        *by_both(("after_recovery", 7)),
    ]


def test_iteration_begins_after_the_last_state_was_acted_on(run: Run) -> None:
    run.loop.iteration, run.loop.grad_norm = 4, 1.5
    expected = by_both(("before_batch", 4, 1.5), ("begin_iteration", 5, None))
    assert run.of(lambda each: each.begin_iteration(5)) == expected
    assert run.loop.is_in_iteration


def test_iteration_that_was_broken_off_leaves_nothing_in_the_state_of_the_loop(run: Run) -> None:
    loop = run.loop
    loop.is_torn = loop.is_replaying = loop.is_in_iteration = True
    loop.phase, loop.grad_norm = Phase.IN_STEP, 1.5
    assert run.of(lambda each: each.suspend(5)) == by_both(("suspend", True))[::-1]
    assert loop == LoopState()


def test_gradients_are_ready_in_a_phase_of_their_own(run: Run) -> None:
    run.loop.iteration = 3
    expected = by_both(("enter_phase", "3", "before-step"), ("before_step",))
    assert run.of(lambda each: each.before_step()) == expected
    assert run.loop.phase is Phase.BEFORE_STEP


def test_state_is_not_torn_while_the_update_waits_to_begin(run: Run) -> None:
    assert run.of(lambda each: each.begin_update()) == by_both(("begin_update", False))
    assert run.loop.is_torn


def test_iteration_is_reported_once_and_after_all_have_acted_on_its_state(run: Run) -> None:
    run.listeners.begin_iteration(4)
    run.b.stall_s = 0.5
    assert run.end_iteration() == by_both(
        ("enter_phase", "4", "between"), ("end_iteration", 5), ("after_iteration", 0.5)
    )
    assert not run.loop.is_in_iteration
    run.b.stall_s = 0.0
    run.loop.stall_s += 0.25  # of a state that was evaluated first
    assert ("after_iteration", "a", 0.25) in run.end_iteration()


def test_listeners_are_closed_backwards_also_when_one_fails(run: Run) -> None:
    run.b.fails_in = "close"
    with pytest.raises(ZeroDivisionError, match="close of b"), run.listeners:
        pass
    assert run.calls == [("close", "b"), ("close", "a")]


def test_failure_is_told_to_all_also_when_one_fails(run: Run) -> None:
    run.a.fails_in = "failed"
    with pytest.raises(ZeroDivisionError, match="failed of a"):
        run.listeners.failed(KeyError("lost"))
    assert run.calls == by_both(("failed", "'lost'"))
