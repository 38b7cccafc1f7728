"""Faults of this rank fire at their phase, once per event log.

tests/distributed has ranks that are killed or hang, and nodes that are lost.
"""

import multiprocessing
import os
import signal

import pytest

from moe_ft.errors import InjectedFaultError
from moe_ft.events import EventLog
from moe_ft.faults import Phase, parse_fault
from moe_ft.loop.faults import Faults
from tests.unit.fault_tolerance.loops import events_in, last_event

_context = multiprocessing.get_context("fork")
DEADLINE_S = 120.0


def faults_of(log: EventLog, *texts: str) -> Faults:
    return Faults([parse_fault(text) for text in texts], log)


def test_exception_is_raised_and_logged_in_its_phase(event_log: EventLog) -> None:
    faults = faults_of(event_log, "exception:3@5:backward")
    waits = [faults.waits_for(i, Phase.BACKWARD) for i in (4, 5)]
    assert (waits, faults.waits_for(5, Phase.IN_STEP)) == ([False, True], False)
    faults.enter_phase(5, Phase.FORWARD)
    faults.enter_phase(4, Phase.BACKWARD)
    assert events_in(event_log) == []
    with pytest.raises(InjectedFaultError, match="--moe-ft-inject-fault exception:3@5:backward"):
        faults.enter_phase(5, Phase.BACKWARD)
    assert last_event(event_log) == {
        "event": "fault_injected",
        "iteration": 5,
        "kind": "exception",
        "phase": "backward",
    }


def test_fault_of_another_rank_does_not_fire(event_log: EventLog) -> None:
    faults = faults_of(event_log, "exception:2@5")
    assert not faults.waits_for(5, Phase.FORWARD)
    faults.enter_phase(5, Phase.FORWARD)


def test_fault_that_fired_in_an_earlier_incarnation_does_not_fire_again(
    event_log: EventLog,
) -> None:
    for _ in range(2):
        faults = faults_of(event_log, "exception:3@5", "exception:3@5")
        try:
            faults.enter_phase(5, Phase.FORWARD)
        except InjectedFaultError:
            continue
    assert [line["event"] for line in events_in(event_log)] == ["fault_injected"]


def test_phase_outside_the_iteration_counts_from_the_iteration_of_its_fault_on(
    event_log: EventLog,
) -> None:
    faults = faults_of(event_log, "exception:3@5:snapshot")
    faults.enter_phase(4, Phase.SNAPSHOT)
    with pytest.raises(InjectedFaultError):
        faults.enter_phase(7, Phase.SNAPSHOT)


def test_rank_that_is_stopped_runs_no_thread_until_it_is_continued(event_log: EventLog) -> None:
    faults = faults_of(event_log, "stop:3@5")
    process = _context.Process(target=faults.enter_phase, args=(5, Phase.FORWARD))
    process.start()
    assert process.pid is not None
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert last_event(event_log)["kind"] == "stop"
    os.kill(process.pid, signal.SIGCONT)
    process.join(DEADLINE_S)
    assert process.exitcode == 0


def test_loss_of_a_node_without_memory_is_an_exception(event_log: EventLog) -> None:
    with pytest.raises(InjectedFaultError, match="lose-node:3@5"):
        faults_of(event_log, "lose-node:3@5").enter_phase(5, Phase.FORWARD)
