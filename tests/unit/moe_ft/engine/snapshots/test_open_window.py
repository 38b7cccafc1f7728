"""Progress of a window: that of its slowest snapshot, and never complete without all of them."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.memory.layout import LazyLayout
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.snapshots.job import (
    OpenWindow,
    ReplicationResult,
    SnapshotJob,
    SnapshotRequest,
    SnapshotResult,
    SnapshotState,
)
from moe_ft.errors import SnapshotError
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from tests.unit.moe_ft.builders import make_window

RUNNING, FAILED, COMPLETE = SnapshotState.RUNNING, SnapshotState.FAILED, SnapshotState.COMPLETE
STATES = st.sampled_from([RUNNING, FAILED, COMPLETE])


def job_in(
    state: SnapshotState, request: SnapshotRequest, *, is_protected: bool = True
) -> SnapshotJob:
    """Return a job in a state, with a peer that got the snapshot or did not."""
    result: Future[SnapshotResult] = Future()
    sent: Future[ReplicationResult] = Future()
    sent.set_result(ReplicationResult(is_protected=is_protected, seconds=0.5))
    if state is COMPLETE:
        result.set_result(SnapshotResult(copy_s=1.0, commit_s=2.0, pooled={}, replication=sent))
    elif state is FAILED:
        result.set_exception(SnapshotError("the copy breaks here"))
    copied, abandoned = threading.Event(), threading.Event()
    return SnapshotJob(request=request, copied=copied, abandoned=abandoned, result=result)


def open_window(
    length: int,
    states: list[SnapshotState],
    *,
    is_given_up: bool = False,
    is_protected: list[bool] | None = None,
    facts: dict[str, Any] | None = None,
) -> OpenWindow:
    """Return a window whose first snapshots are in these states."""
    plans = tuple(SnapshotPlan(levels={}) for _ in range(length))
    region, layout = Region(Path("."), 0, 0), LazyLayout(lambda: make_window(length=length).layout)
    jobs = [
        job_in(
            state,
            SnapshotRequest(
                region=region,
                window=layout,
                position=position,
                iteration=5 + position,
                keep_iteration=None,
                plan=plans[position],
            ),
            is_protected=is_protected[position] if is_protected else True,
        )
        for position, state in enumerate(states)
    ]
    return OpenWindow(
        plan=WindowPlan(snapshots=plans, facts=facts or {}),
        layout=layout,
        region=region,
        jobs=jobs,
        is_given_up=is_given_up,
    )


@st.composite
def windows(draw: st.DrawFn) -> OpenWindow:
    length = draw(st.integers(1, 4))
    states = draw(st.lists(STATES, min_size=1, max_size=length))
    return open_window(length, states, is_given_up=draw(st.booleans()))


@settings(max_examples=60)
@given(windows())
def test_window_is_complete_only_with_all_of_its_snapshots_complete(window: OpenWindow) -> None:
    has_all = [job.state for job in window.jobs] == [COMPLETE] * len(window.plan.snapshots)
    assert (window.state is COMPLETE) == (has_all and not window.is_given_up)


@settings(max_examples=60)
@given(windows())
def test_region_of_a_window_is_not_let_go_while_a_snapshot_may_still_be_read_or_written(
    window: OpenWindow,
) -> None:
    # A state other than RUNNING makes the engine fill the region again.
    if any(job.state is RUNNING for job in window.jobs):
        assert window.state is RUNNING


@settings(max_examples=60)
@given(windows())
def test_window_that_needs_another_snapshot_is_running(window: OpenWindow) -> None:
    if window.is_growing:
        assert window.state is RUNNING


@settings(max_examples=60)
@given(windows())
def test_window_is_never_in_the_state_of_none(window: OpenWindow) -> None:
    assert window.state in (RUNNING, FAILED, COMPLETE)


@pytest.mark.parametrize(
    ("length", "states", "is_given_up", "expected"),
    [
        (1, [RUNNING], False, RUNNING),
        (1, [COMPLETE], False, COMPLETE),
        (1, [FAILED], False, FAILED),
        (3, [COMPLETE], False, RUNNING),
        (3, [COMPLETE, COMPLETE], False, RUNNING),
        (3, [COMPLETE, COMPLETE, RUNNING], False, RUNNING),
        (3, [COMPLETE, RUNNING, COMPLETE], False, RUNNING),
        (3, [COMPLETE, COMPLETE, COMPLETE], False, COMPLETE),
        (3, [COMPLETE, FAILED], False, RUNNING),  # the other ranks have to learn it first
        (3, [COMPLETE, FAILED], True, FAILED),
        (3, [COMPLETE, FAILED, FAILED], False, FAILED),
        (3, [COMPLETE, RUNNING], True, RUNNING),
        (3, [COMPLETE, COMPLETE], True, FAILED),  # because of another rank
        (3, [FAILED, RUNNING], True, RUNNING),
    ],
)
def test_state_of_a_window_is_that_worked_by_hand(
    length: int, states: list[SnapshotState], is_given_up: bool, expected: SnapshotState
) -> None:
    assert open_window(length, states, is_given_up=is_given_up).state is expected


@pytest.mark.parametrize(
    ("states", "is_given_up", "expected"),
    [
        ([COMPLETE], False, True),
        ([RUNNING, RUNNING], False, True),
        ([COMPLETE] * 3, False, False),
        ([COMPLETE], True, False),
    ],
)
def test_window_grows_until_it_is_full_or_given_up(
    states: list[SnapshotState], is_given_up: bool, expected: bool
) -> None:
    assert open_window(3, states, is_given_up=is_given_up).is_growing is expected


@pytest.mark.parametrize("position", [0, 1, 2])
def test_window_has_failed_when_any_snapshot_has(position: int) -> None:
    states = [COMPLETE] * 3
    assert not open_window(3, states).has_failed
    states[position] = FAILED
    assert open_window(3, states).has_failed


@pytest.mark.parametrize("position", [0, 1, 2])
def test_window_is_protected_when_peers_have_every_snapshot(position: int) -> None:
    protected = [True] * 3
    assert open_window(3, [COMPLETE] * 3, is_protected=protected).is_protected
    protected[position] = False
    assert not open_window(3, [COMPLETE] * 3, is_protected=protected).is_protected


def test_last_job_is_the_one_that_was_begun_last() -> None:
    window = open_window(3, [COMPLETE, RUNNING])
    assert window.last is window.jobs[1]


def test_window_says_how_large_its_snapshots_were_and_what_its_strategy_says() -> None:
    window = open_window(3, [COMPLETE] * 3, facts={"reordered": True})
    sizes = [sum(place.num_bytes for place in places) for places in window.layout.get().snapshots]
    assert window.facts() == {"length": 3, "bytes": sizes, "reordered": True}


def test_window_of_a_strategy_without_facts_says_nothing() -> None:
    assert open_window(1, [COMPLETE]).facts() == {}


def test_window_whose_first_snapshot_cannot_be_begun_has_failed() -> None:
    window = open_window(3, [])
    window.break_off()
    assert window.state is FAILED
    assert window.last is None


def test_window_that_breaks_off_waits_for_the_snapshot_before() -> None:
    window = open_window(3, [RUNNING])
    window.break_off()
    assert window.has_failed
    assert window.state is RUNNING
