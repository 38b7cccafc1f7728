"""Ranks that leave: each writes its breakpoint once, and all meet at the latest iteration, if they can.

The simulation has whole jobs that are told to end.
"""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend "fake"

from moe_ft.cluster.signed_store import SignedStore
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.observability import FaultConfig
from moe_ft.engine.breakpoints import Breakpoints
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.events import EventLog
from moe_ft.loop import failure_report
from moe_ft.loop import leaving as module
from moe_ft.loop.failure_report import FailureReport
from moe_ft.loop.leaving import (
    BreakpointMeeting,
    BreakpointWriter,
    JobProcesses,
    JobRank,
    gone_ranks,
    meet_processes,
)
from moe_ft.loop.listeners import LoopState
from moe_ft.verdicts import Failure, FailureKind
from tests.unit.fault_tolerance.loops import events_in, last_event
from tests.unit.moe_ft.engine.boundary.logs import SmallLog, sends_of, small_log
from tests.unit.moe_ft.engine.engine_job import Job, Setup, capture
from tests.unit.moe_ft.together import run_together
from tests.waiting import wait_for

DEADLINE_S = 120.0
OWN = JobProcesses(pids={0: os.getpid()}, token="the token")


def test_process_that_has_ended_is_gone_before_and_after_somebody_waits_for_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_for(lambda: gone_ranks({5: process.pid}), "the end of the process")
    process.wait()
    assert gone_ranks({4: os.getpid(), 5: process.pid}) == {5}


def test_rank_sees_itself() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert meet_processes().pids == {0: os.getpid()}
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than a busy machine takes."""
    for name in ("_MEETING_S", "_STEP_S", "_ANSWER_S"):
        monkeypatch.setattr(module, name, 100.0)


def _meeting(
    store: Any, rank: int, world_size: int, processes: JobProcesses = OWN, *, start: int = 0
) -> BreakpointMeeting:
    own = JobRank(store=store, rank=rank, world_size=world_size)
    return BreakpointMeeting(own, start, processes)


def agree(store: dist.Store, iterations: Sequence[int | None]) -> list[int | None]:
    """Return what ranks agree on, each with the breakpoint of an iteration, or none."""
    world_size = len(iterations)

    def of_rank(rank: int, gather: object) -> int | None:
        meeting = _meeting(store, rank, world_size)
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
    monkeypatch.setattr(module, "_MEETING_S", 1e9)
    assert agree(dist.HashStore(), [4, None, 5]) == [None] * 3


def test_nobody_waits_for_a_rank_whose_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEETING_S", 1e9)
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    store = dist.HashStore()
    seen = replace(OWN, pids={**OWN.pids, 1: process.pid})
    assert _meeting(store, 0, 3, seen).agree(4) is None
    # A rank on another machine, which cannot see that process, learns of it.
    assert _meeting(store, 2, 3, replace(OWN, pids={2: os.getpid()})).agree(4) is None


def test_rank_that_says_nothing_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEETING_S", 0.0)
    assert _meeting(dist.HashStore(), 0, 2).agree(4) is None


def test_store_that_does_not_answer_ends_the_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEETING_S", 1e9)

    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("Connection reset by peer")

    meeting = _meeting(Broken(), 0, 2)
    assert meeting.agree(4) is None
    meeting.wait_for_others()


def test_earlier_starts_do_not_count() -> None:
    store = dist.HashStore()
    assert agree(store, [4, 5]) == [5, 5]
    meeting = _meeting(store, 0, 1, start=1)
    assert meeting.agree(2) == 2


@pytest.fixture
def breakpoints(tmp_path: Path) -> Iterator[Breakpoints]:
    """Return the breakpoint of a rank whose state is of iteration 3."""
    job = Job(tmp_path / "job", Setup(has_breakpoints=True))
    (rank,) = job.ranks
    found = rank.engine.breakpoints
    assert found is not None
    rank.state.step(3)
    found.note(rank.engine.moment(capture(3)))
    yield found
    job.close()


@pytest.fixture
def writer(breakpoints: Breakpoints, event_log: EventLog) -> BreakpointWriter:
    writer = BreakpointWriter(LoopState(iteration=3), event_log)
    writer.use(breakpoints, JobProcesses(), is_on_gpu=False)
    return writer


def test_sigterm_leaves_a_breakpoint_and_an_event(
    writer: BreakpointWriter, event_log: EventLog, capsys: pytest.CaptureFixture[str]
) -> None:
    writer.on_sigterm()
    found = last_event(event_log)
    assert (found["event"], found["iteration"], found["reason"]) == ("breakpoint", 3, "SIGTERM")
    assert found["problem"] == "" and found["bytes"] > 0
    assert found["seconds"] >= found["copy_s"] > 0
    assert "moe_ft: rank 3 left a breakpoint of iteration 3" in capsys.readouterr().err


def test_repair_leaves_a_breakpoint_and_the_start_after_it_can_leave_another(
    writer: BreakpointWriter, breakpoints: Breakpoints, event_log: EventLog
) -> None:
    writer.on_repair(3)
    writer.on_sigterm()
    assert [line["reason"] for line in events_in(event_log)] == ["repair"]
    assert last_event(event_log)["problem"] == ""
    writer.use(breakpoints, JobProcesses(), is_on_gpu=False)
    writer.on_repair(3)
    assert [line["reason"] for line in events_in(event_log)] == ["repair", "repair"]


@pytest.mark.parametrize(("broken", "problem"), [(3, ""), (2, "the device had received all gra")])
def test_repair_on_a_gpu_leaves_no_state_that_the_broken_iteration_has_made(
    broken: int,
    problem: str,
    writer: BreakpointWriter,
    breakpoints: Breakpoints,
    event_log: EventLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(module, "_abort_collectives", lambda: aborted.append("groups"))
    writer.use(breakpoints, JobProcesses(), is_on_gpu=True)
    writer.on_repair(broken)
    found = last_event(event_log)
    assert bool(found["bytes"]) == (not problem)
    assert problem in found["problem"]
    assert aborted == [], "the groups of a repair stay"


def test_rank_whose_groups_were_aborted_names_the_silent_ones_and_nobody_waits_for_its_step(
    breakpoints: Breakpoints, event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_report, "meet_processes", lambda: OWN)
    config = MoeFtConfig(fault=FaultConfig(fault_report_grace_s=0.0))
    loop = LoopState(iteration=3)
    report = FailureReport(config, loop, event_log, on_sigterm=False)
    writer = BreakpointWriter(loop, event_log)
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=3)
    job_store = dist.distributed_c10d._get_default_store()
    report.after_setup(([], None, None))
    writer.use(breakpoints, OWN, is_on_gpu=True)
    writer.on_failure(RuntimeError("lost"))
    assert not dist.is_initialized()
    lost = Failure(rank=0, kind=FailureKind.NETWORK, what="RuntimeError: lost", iteration=5)
    report._report("RuntimeError: lost", lost)
    assert last_event(event_log)["silent_ranks"] == [1, 2]
    said = SignedStore(job_store, lambda: OWN.token)
    assert said.get(f"moe_ft/breakpoints/{event_log.incarnation}/alone")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ConfigError("no"), "refused"),
        (UnrecoverableError("nothing"), "refused"),
        (RuntimeError(f"found {math.nan} in local forward loss calculation"), "rejected"),
    ],
)
def test_refusal_or_a_result_that_is_rejected_leaves_none(
    error: Exception, problem: str, writer: BreakpointWriter, event_log: EventLog
) -> None:
    writer.on_failure(error)
    found = last_event(event_log)
    assert found["bytes"] == 0
    assert problem in found["problem"]


class Leaving:
    """A rank that leaves while the log of an iteration is not committed.

    Attributes:
        log: of what it has sent.
    """

    def __init__(self, breakpoints: Breakpoints, event_log: EventLog, log: SmallLog) -> None:
        self.log, self._event_log = log, event_log
        self.writer = BreakpointWriter(LoopState(iteration=3), event_log)
        self.writer.use(breakpoints, JobProcesses(), is_on_gpu=False, boundary=log.log)
        log.log.begin(2)
        for each in sends_of(2):
            log.log.record(*each)
        log.log.end()

    def commit_when_the_breakpoint_is_there(self) -> None:
        """Have another thread commit the log, not earlier."""

        def commit() -> None:
            deadline_s = time.monotonic() + DEADLINE_S
            while not events_in(self._event_log) and time.monotonic() < deadline_s:
                time.sleep(0.01)
            self.log.worker.work()

        threading.Thread(target=commit, daemon=True).start()


@pytest.fixture
def leaving(breakpoints: Breakpoints, event_log: EventLog, tmp_path: Path) -> Iterator[Leaving]:
    directory = tmp_path / "sent"
    directory.mkdir()
    with small_log(directory) as log:
        yield Leaving(breakpoints, event_log, log)


@pytest.mark.parametrize("why", [None, RuntimeError("Connection closed by peer")])
def test_rank_leaves_when_what_it_has_sent_is_committed(
    why: Exception | None, leaving: Leaving, event_log: EventLog
) -> None:
    leaving.commit_when_the_breakpoint_is_there()
    if why is None:
        leaving.writer.on_sigterm()
    else:
        leaving.writer.on_failure(why)
    assert leaving.log.held() == [2]
    assert [line["event"] for line in events_in(event_log)] == ["breakpoint"]


def test_sigterm_that_comes_while_the_log_is_committed_waits_for_it(leaving: Leaving) -> None:
    leaving.commit_when_the_breakpoint_is_there()
    first = threading.Thread(target=lambda: leaving.writer.on_failure(RuntimeError("lost")))
    first.start()
    leaving.writer.on_sigterm()
    assert leaving.log.held() == [2]
    first.join(DEADLINE_S)


def test_log_that_is_not_committed_in_time_is_said(
    leaving: Leaving,
    event_log: EventLog,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "_LEAVING_S", 0.0)
    leaving.writer.on_sigterm()
    found = last_event(event_log)
    reason = "not committed within 0 s: the next recovery may be global"
    assert (found["event"], found["part"], found["iteration"]) == ("degraded", "boundary-log", 3)
    assert reason in found["reason"]
    assert f"{reason}\n" in capsys.readouterr().err
    assert leaving.log.held() == []


def test_rank_without_memory_for_one_says_nothing(event_log: EventLog) -> None:
    writer = BreakpointWriter(LoopState(), event_log)
    writer.on_sigterm()
    writer.on_failure(RuntimeError("lost"))
    assert events_in(event_log) == []
