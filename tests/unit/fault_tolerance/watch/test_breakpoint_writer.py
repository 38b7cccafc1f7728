"""A rank writes its breakpoint once, before its report, and says why if there is none."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fault_tolerance.seams.listeners import LoopState
from megatron.fault_tolerance.watch.breakpoint_writer import BreakpointWriter
from moe_ft.engine.breakpoints import Breakpoints
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.events import EventLog
from tests.unit.fault_tolerance.loops import events_in, last_event
from tests.unit.moe_ft.engine.engine_job import Job, Setup, capture


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
    writer.use(breakpoints, {}, is_on_gpu=False)
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


def test_exception_from_a_dead_peer_leaves_one_and_a_later_sigterm_none(
    writer: BreakpointWriter, event_log: EventLog
) -> None:
    writer.on_failure(RuntimeError("Connection closed by peer"))
    writer.on_sigterm()
    assert [line["reason"] for line in events_in(event_log)] == ["RuntimeError"]


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


def test_failure_in_a_step_leaves_none(
    writer: BreakpointWriter, breakpoints: Breakpoints, event_log: EventLog
) -> None:
    breakpoints.begin_update()
    writer.on_failure(RuntimeError("Connection closed by peer"))
    assert "mixture of two iterations" in last_event(event_log)["problem"]


def test_rank_without_memory_for_one_says_nothing(event_log: EventLog) -> None:
    writer = BreakpointWriter(LoopState(), event_log)
    writer.on_sigterm()
    writer.on_failure(RuntimeError("lost"))
    assert events_in(event_log) == []
