"""A rank writes its breakpoint once, before its report, and says why if there is none."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ft.engine.breakpoints import Breakpoints
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.events import EventLog
from moe_ft.loop import breakpoint_writer as module
from moe_ft.loop.breakpoint_writer import BreakpointWriter
from moe_ft.loop.listeners import LoopState
from moe_ft.loop.local_processes import JobProcesses
from tests.unit.fault_tolerance.loops import events_in, last_event
from tests.unit.moe_ft.engine.boundary.logs import SmallLog, sends_of, small_log
from tests.unit.moe_ft.engine.engine_job import Job, Setup, capture

DEADLINE_S = 120.0


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


@pytest.mark.parametrize("error", [ConfigError("no"), UnrecoverableError("nothing")])
def test_refusal_leaves_none(
    error: Exception, writer: BreakpointWriter, event_log: EventLog
) -> None:
    writer.on_failure(error)
    found = last_event(event_log)
    assert found["bytes"] == 0
    assert "refused" in found["problem"]


def test_result_that_is_not_finite_leaves_none(
    writer: BreakpointWriter, event_log: EventLog
) -> None:
    writer.on_failure(RuntimeError(f"found {math.nan} in local forward loss calculation"))
    assert "not finite" in last_event(event_log)["problem"]


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
    found, reason = (
        last_event(event_log),
        "not committed within 0 s: the next recovery may be global",
    )
    assert (found["event"], found["part"], found["iteration"]) == ("degraded", "boundary-log", 3)
    assert reason in found["reason"]
    assert f"{reason}\n" in capsys.readouterr().err
    assert leaving.log.held() == []


def test_rank_without_memory_for_one_says_nothing(event_log: EventLog) -> None:
    writer = BreakpointWriter(LoopState(), event_log)
    writer.on_sigterm()
    writer.on_failure(RuntimeError("lost"))
    assert events_in(event_log) == []
