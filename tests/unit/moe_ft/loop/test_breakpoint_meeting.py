"""Ranks that are told to end meet at the latest iteration, and wait for nobody who will not come."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from moe_ft.loop import breakpoint_meeting
from moe_ft.loop.breakpoint_meeting import BreakpointMeeting
from moe_ft.loop.local_processes import JobProcesses
from tests.unit.moe_ft.together import run_together

OWN = JobProcesses(pids={0: os.getpid()}, token="the token")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than a busy machine takes."""
    for name in ("_MEETING_S", "_STEP_S", "_ANSWER_S"):
        monkeypatch.setattr(breakpoint_meeting, name, 100.0)


def agree(store: dist.Store, iterations: Sequence[int | None]) -> list[int | None]:
    """Return what ranks agree on, each with the breakpoint of an iteration, or none."""
    world_size = len(iterations)

    def of_rank(rank: int, gather: object) -> int | None:
        meeting = BreakpointMeeting(store, rank, world_size, 0, OWN)
        iteration = iterations[rank]
        if iteration is None:
            meeting.cannot_step()
            return None
        target = meeting.agree(iteration)
        if target is not None:
            meeting.wait_for_others()
        return target

    return run_together(world_size, of_rank)


@pytest.mark.parametrize("iterations", [[4, 4, 4], [4, 5, 4], [5, 4, 5]])
def test_ranks_meet_at_the_latest_iteration(iterations: list[int]) -> None:
    assert agree(dist.HashStore(), iterations) == [max(iterations)] * 3


def test_nobody_waits_for_a_rank_without_a_breakpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakpoint_meeting, "_MEETING_S", 1e9)
    assert agree(dist.HashStore(), [4, None, 5]) == [None] * 3


def test_nobody_waits_for_a_rank_whose_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakpoint_meeting, "_MEETING_S", 1e9)
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    store = dist.HashStore()
    assert (
        BreakpointMeeting(store, 0, 3, 0, replace(OWN, pids={**OWN.pids, 1: process.pid})).agree(4)
        is None
    )
    # A rank on another machine, which cannot see that process, learns of it.
    assert BreakpointMeeting(store, 2, 3, 0, replace(OWN, pids={2: os.getpid()})).agree(4) is None


def test_rank_that_says_nothing_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakpoint_meeting, "_MEETING_S", 0.0)
    assert BreakpointMeeting(dist.HashStore(), 0, 2, 0, OWN).agree(4) is None


def test_store_that_does_not_answer_ends_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakpoint_meeting, "_MEETING_S", 1e9)

    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("Connection reset by peer")

    meeting = BreakpointMeeting(Broken(), 0, 2, 0, OWN)
    assert meeting.agree(4) is None
    meeting.wait_for_others()


def test_earlier_starts_do_not_count() -> None:
    store = dist.HashStore()
    assert agree(store, [4, 5]) == [5, 5]
    meeting = BreakpointMeeting(store, 0, 1, 1, OWN)
    assert meeting.agree(2) == 2


def test_stranger_who_writes_to_the_store_changes_no_meeting() -> None:
    store: Any = dist.HashStore()
    for what in ("at", "done"):
        store.append(f"moe_ft/breakpoints/0/{what}", "9 [1,9]\n")
        store.add(f"moe_ft/breakpoints/0/{what}/count", 100)
    store.set("moe_ft/breakpoints/0/alone", "1")
    assert agree(store, [4, 5, 4]) == [5] * 3
