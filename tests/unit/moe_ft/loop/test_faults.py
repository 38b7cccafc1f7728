"""Faults of this rank fire at their phase, once per event log, and do what they are called."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from moe_ft.errors import InjectedFaultError
from moe_ft.events import EventLog
from moe_ft.faults import Phase, parse_fault
from moe_ft.loop.faults import Faults, Node
from tests.unit.fault_tolerance.loops import events_in, last_event
from tests.waiting import wait_for

_context = multiprocessing.get_context("fork")
DEADLINE_S = 120.0


def faults_of(log: EventLog, *texts: str) -> Faults:
    return Faults([parse_fault(text) for text in texts], log)


def test_exception_is_raised_and_logged_in_its_phase(event_log: EventLog) -> None:
    faults = faults_of(event_log, "exception:3@5:backward")
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


def test_phase_is_awaited_only_in_the_iteration_of_a_fault(event_log: EventLog) -> None:
    faults = faults_of(event_log, "exception:3@5:in-step")
    assert faults.waits_for(5, Phase.IN_STEP)
    assert not faults.waits_for(6, Phase.IN_STEP)
    assert not faults.waits_for(5, Phase.AFTER_STEP)


def test_phase_outside_the_iteration_counts_from_the_iteration_of_its_fault_on(
    event_log: EventLog,
) -> None:
    faults = faults_of(event_log, "exception:3@5:snapshot")
    faults.enter_phase(4, Phase.SNAPSHOT)
    with pytest.raises(InjectedFaultError):
        faults.enter_phase(7, Phase.SNAPSHOT)


def test_killed_rank_is_gone_and_has_said_why(event_log: EventLog) -> None:
    faults = faults_of(event_log, "kill:3@5")
    process = _context.Process(target=faults.enter_phase, args=(5, Phase.FORWARD))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    assert last_event(event_log)["kind"] == "kill"


def test_rank_that_hangs_is_there_until_it_is_killed(event_log: EventLog) -> None:
    faults = faults_of(event_log, "hang:3@5")
    process = _context.Process(target=faults.enter_phase, args=(5, Phase.FORWARD))
    process.start()
    wait_for(lambda: events_in(event_log), "the event of the fault")
    process.join(0.1)
    assert process.is_alive()
    process.kill()
    process.join(DEADLINE_S)
    assert last_event(event_log)["kind"] == "hang"


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


def test_lost_node_takes_its_memory_and_all_its_ranks_with_it(
    event_log: EventLog, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "region_0").touch()
    other = _context.Process(target=time.sleep, args=(10 * DEADLINE_S,), daemon=True)
    other.start()
    assert other.pid is not None
    pids = (other.pid,)

    def lose() -> None:
        faults = faults_of(event_log, "lose-node:3@5")
        faults.set_node(lambda: Node(pids=(*pids, os.getpid()), directory=memory))
        faults.enter_phase(5, Phase.FORWARD)

    process = _context.Process(target=lose)
    process.start()
    for each in (process, other):
        each.join(DEADLINE_S)
        assert each.exitcode == -signal.SIGKILL
    assert not memory.exists()


def test_loss_of_a_node_without_memory_is_an_exception(event_log: EventLog) -> None:
    with pytest.raises(InjectedFaultError, match="lose-node:3@5"):
        faults_of(event_log, "lose-node:3@5").enter_phase(5, Phase.FORWARD)
