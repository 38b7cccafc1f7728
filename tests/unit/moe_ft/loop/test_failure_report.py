"""A rank that stops says why, once, and names the ranks that gave no sign of life."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend "fake"

from moe_ft.cluster import member
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.observability import FaultConfig, ObservabilityConfig
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.events import EventLog
from moe_ft.faults import Phase
from moe_ft.loop import failure_report
from moe_ft.loop.failure_report import FailureReport
from moe_ft.loop.leaving import JobProcesses, find_job_rank, meet_processes
from moe_ft.loop.listeners import Listeners, LoopState
from moe_ft.loop.waits import joined
from moe_ft.verdicts import Failure, FailureKind
from tests.unit.fault_tolerance.loops import events_in, last_event
from tests.unit.signed import member_of
from tests.waiting import wait_for

CONFIG = MoeFtConfig(
    observability=ObservabilityConfig(event_log="somewhere"),
    fault=FaultConfig(fault_report_grace_s=0.0),
)
LOST = Failure(rank=0, kind=FailureKind.NETWORK, what="RuntimeError: lost", iteration=5)
LOOP = LoopState(iteration=5, phase=Phase.IN_STEP, is_torn=True)
DEADLINE_S = 120.0
_context = multiprocessing.get_context("fork")
Run = Callable[[Callable[[FailureReport], object]], int | None]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for the store and the end of a process than a busy machine takes."""
    for name in ("_STORE_DEADLINE_S", "_HURRIED_STORE_DEADLINE_S", "_EXIT_DEADLINE_S"):
        monkeypatch.setattr(failure_report, name, DEADLINE_S)


@pytest.fixture
def run(event_log: EventLog, tmp_path: Path) -> Run:
    """Return a function that acts on a report in a process, as it may end it; returns the exit code."""

    def run(act: Callable[[FailureReport], object]) -> int | None:
        process = _context.Process(target=_act, args=(act, event_log, tmp_path / "output"))
        process.start()
        process.join(DEADLINE_S)
        return process.exitcode

    return run


def note_of(failure: Failure, **values: Any) -> dict[str, Any]:
    """Return the note that another rank leaves."""
    return asdict(failure_report._Note(**{"timed_out": False, **values}, failure=asdict(failure)))


TRACE = b"""{"version": "2.10", "entries": [{"process_group": ["0", "world"], "is_p2p": false,
    "collective_seq_id": 8, "profiling_name": "gloo:all_reduce"}]}"""
TIMED_OUT = note_of(replace(LOST, rank=1), timed_out=True)


def _act(act: Callable[[FailureReport], object], log: EventLog, output: Path) -> None:
    sys.stderr = output.open("w")
    report = FailureReport(CONFIG, LOOP, log, on_sigterm=True)
    with Listeners(LOOP, [report]):
        act(report)


def told_to_end(report: FailureReport) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(DEADLINE_S)


def test_exception_is_reported_with_its_place_and_the_state_it_left(
    run: Run, event_log: EventLog, tmp_path: Path
) -> None:
    text = "[/pytorch/gloo/pair.cc:12] Connection\n closed"
    assert run(lambda report: report.failed(RuntimeError(text))) == 0
    reason = "RuntimeError: Connection closed"
    assert last_event(event_log) == {
        "event": "stopped",
        "iteration": 5,
        "phase": "in-step",
        "reason": reason,
        "torn": True,
        "silent_ranks": None,
        "timed_out": False,
    }
    said = (tmp_path / "output").read_text().splitlines()
    assert said[0] == f"WARNING moe_ft: rank 3 stopped in iteration 5, phase in-step: {reason}"
    assert str(event_log.directory) in said[1]


def test_rank_that_waited_in_vain_says_so(run: Run, event_log: EventLog) -> None:
    run(lambda report: report.failed(RuntimeError("Timed out waiting 4000ms")))
    assert last_event(event_log)["timed_out"]


def test_sigterm_is_reported_and_ends_the_process(run: Run, event_log: EventLog) -> None:
    assert run(told_to_end) == 128 + signal.SIGTERM
    assert last_event(event_log)["reason"].startswith("SIGTERM: told to end")


def test_rank_that_fails_and_is_then_told_to_end_reports_once(
    run: Run, event_log: EventLog
) -> None:
    def fail_and_close(report: FailureReport) -> None:
        report.failed(RuntimeError("lost"))
        report.close()  # still listens: every rank is to end in the same way
        told_to_end(report)

    assert run(fail_and_close) == 128 + signal.SIGTERM
    reasons = [line["reason"] for line in events_in(event_log) if line["event"] == "stopped"]
    assert reasons == ["RuntimeError: lost"]


@pytest.mark.parametrize("error", [ConfigError("no"), UnrecoverableError("nothing")])
def test_refusal_is_no_failure(error: Exception, run: Run, event_log: EventLog) -> None:
    assert run(lambda report: report.failed(error)) == 0
    assert events_in(event_log) == []


def test_sigterm_after_the_end_is_not_ours(run: Run, event_log: EventLog) -> None:
    def close(report: FailureReport) -> None:
        report.close()
        told_to_end(report)

    assert run(close) == -signal.SIGTERM
    assert events_in(event_log) == []


def test_forked_process_that_is_told_to_end_does_not_report(run: Run, event_log: EventLog) -> None:
    def fork(report: FailureReport) -> None:
        read, write = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.write(write, b".")
            time.sleep(DEADLINE_S)
            os._exit(0)
        os.read(read, 1)
        os.kill(worker, signal.SIGTERM)
        _, status = os.waitpid(worker, 0)
        os._exit(os.WTERMSIG(status))

    assert run(fork) == signal.SIGTERM
    assert events_in(event_log) == []


def test_sigterm_is_left_alone_where_megatron_handles_it(event_log: EventLog) -> None:
    before = signal.getsignal(signal.SIGTERM)
    report = FailureReport(CONFIG, LOOP, event_log, on_sigterm=False)
    with Listeners(LOOP, [report]):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def store() -> Iterator[dist.Store]:
    """Yield the store of a job of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()


def test_rank_learns_that_another_one_had_timed_out(store: dist.Store, event_log: EventLog) -> None:
    report = FailureReport(CONFIG, LOOP, event_log, on_sigterm=False)
    report._processes = JobProcesses(token="the token")
    notes = SignedStore(store, lambda: "the token")
    notes.append(f"moe_ft/stopped/{event_log.incarnation}", [1, TIMED_OUT])
    report._report("RuntimeError: lost", LOST)
    assert last_event(event_log)["timed_out"]
    assert last_event(event_log)["silent_ranks"] == [], "it has left a note"


def test_survivor_and_replacement_read_each_others_notes_when_the_setup_of_a_repair_fails(
    store: dist.Store, event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_own", member_of(died_s=1.0))
    report = FailureReport(CONFIG, LOOP, event_log, on_sigterm=False)  # not set up
    notes = SignedStore(store, lambda: meet_processes().token)
    notes.append(f"moe_ft/stopped/{event_log.incarnation}", [1, TIMED_OUT])
    report._report("RepairError: refused", LOST)
    assert last_event(event_log)["timed_out"], "the note counts"


def test_notes_of_a_stranger_say_nothing_of_the_ranks(
    store: dist.Store, event_log: EventLog, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"moe_ft/stopped/{event_log.incarnation}"
    store.set(key, "0 [1,true]\nnonsense")
    store.add(f"{key}/count", 100)
    report = FailureReport(CONFIG, LOOP, event_log, on_sigterm=False)
    report._processes = JobProcesses(token="the token")
    report._report("RuntimeError: lost", LOST)
    found = last_event(event_log)
    assert (found["silent_ranks"], found["timed_out"]) == ([], False)
    assert capsys.readouterr().err.count("in the job's store is ignored") == 1


@pytest.fixture
def three_ranks() -> Iterator[None]:
    """Make this process rank 0 of three, of which the others do nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


def verdicts_in(log: EventLog) -> list[dict[str, Any]]:
    return [line for line in events_in(log) if line["event"] == "verdict"]


PATIENT = replace(CONFIG, fault=FaultConfig(fault_report_grace_s=600.0))


@pytest.mark.usefixtures("three_ranks")
def test_rank_that_fails_names_all_that_left_no_note(event_log: EventLog) -> None:
    FailureReport(CONFIG, LOOP, event_log, on_sigterm=False)._report("RuntimeError: lost", LOST)
    assert last_event(event_log)["silent_ranks"] == [1, 2]


@pytest.mark.parametrize("has_said", [False, True])
def test_first_rank_that_misses_others_says_so_whichever_were_heard(
    has_said: bool, event_log: EventLog, capsys: pytest.CaptureFixture[str]
) -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=3)
    try:
        report = FailureReport(CONFIG, LOOP, event_log, on_sigterm=False)
        report._processes = JobProcesses(token="the token")
        notes = SignedStore(dist.distributed_c10d._get_default_store(), lambda: "the token")
        key = f"moe_ft/stopped/{event_log.incarnation}"
        notes.append(
            key, [0, note_of(LOST, timed_out=True)]
        )  # told to end before it missed rank 2, unless it has said so
        if has_said:
            notes.set_first(f"{key}/first", 0)
        report._report("RuntimeError: lost", replace(LOST, rank=1), timed_out=True)
    finally:
        dist.destroy_process_group()
    assert last_event(event_log)["silent_ranks"] == [2]
    assert ("heard nothing from rank 2" in capsys.readouterr().err) != has_said


@pytest.mark.usefixtures("three_ranks")
def test_rank_that_is_told_to_end_waits_for_nobody_and_names_whose_process_is_gone(
    event_log: EventLog,
) -> None:
    report = FailureReport(PATIENT, LOOP, event_log, on_sigterm=False)
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    report._processes = JobProcesses(pids={0: os.getpid(), 1: gone.pid, 2: os.getppid()})
    report._report_sigterm()
    assert last_event(event_log)["silent_ranks"] == [1]
    (verdict,) = verdicts_in(event_log)
    assert (verdict["ranks"], verdict["kind"]) == ([1], "killed")


@pytest.mark.usefixtures("three_ranks")
def test_sigterm_ends_the_wait_of_a_rank_that_has_failed(event_log: EventLog) -> None:
    report = FailureReport(PATIENT, LOOP, event_log, on_sigterm=False)
    failing = threading.Thread(target=report._report, args=("RuntimeError: lost", LOST))
    failing.start()
    wait_for(lambda: report._has_reported, "the report of the exception")
    report._report_sigterm()
    failing.join(DEADLINE_S)
    reasons = [line["reason"] for line in events_in(event_log) if line["event"] == "stopped"]
    assert reasons == ["RuntimeError: lost"]


def test_breakpoint_comes_before_the_report(event_log: EventLog) -> None:
    def fail() -> None:
        event_log.write("breakpoint", 5)
        raise RuntimeError("lost")

    report = FailureReport(CONFIG, LOOP, event_log, on_sigterm=False, before_report=fail)
    report._report_sigterm()
    assert [line["event"] for line in events_in(event_log)] == ["breakpoint", "stopped"]


BAD_DATA = Failure(rank=2, kind=FailureKind.DATA, what="KeyError: 7", iteration=5, node="b")
TOLD = Failure(rank=2, kind=FailureKind.TIME_LIMIT, what="told to end", iteration=5)


@pytest.mark.parametrize(
    ("failure", "has_said", "says"),
    [(BAD_DATA, False, True), (TOLD, False, False), (BAD_DATA, True, False)],
    ids=["knows the cause", "knows nothing of rank 1", "comes second"],
)
@pytest.mark.usefixtures("three_ranks")
def test_rank_that_is_told_to_end_gives_the_verdict_if_it_knows_enough_and_nobody_has(
    failure: Failure,
    has_said: bool,
    says: bool,
    event_log: EventLog,
    capsys: pytest.CaptureFixture[str],
) -> None:
    notes = SignedStore(dist.distributed_c10d._get_default_store(), lambda: "the token")
    key = f"moe_ft/stopped/{event_log.incarnation}"
    notes.append(key, [2, note_of(failure)])
    if has_said:
        notes.set_first(f"{key}/verdict", 1)
    report = FailureReport(PATIENT, LOOP, event_log, on_sigterm=False)
    report._processes = JobProcesses(token="the token")
    report._report_sigterm()
    assert [each["what"] for each in verdicts_in(event_log)] == ["KeyError: 7"] * says
    line = "verdict: rank 2 (node b) in iteration 5: data: KeyError: 7. A restart helps unless"
    assert (line in capsys.readouterr().err) == says


def test_verdict_names_who_waits_in_which_collective_and_who_did_not_join_it(
    store: dist.Store, event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_report, "recorded", lambda: TRACE)
    report = FailureReport(CONFIG, LOOP, event_log, on_sigterm=False)
    report._processes = JobProcesses(token="the token")
    notes = SignedStore(store, lambda: "the token")
    wait = "all_reduce (finalize_model_grads)"
    waiting = note_of(replace(LOST, rank=1), wait=wait, joined={"0": (8, "all_reduce of world")})
    cause = Failure(rank=2, kind=FailureKind.HANG, what="no progress", iteration=5)
    late = note_of(cause, joined={"0": (7, "all_reduce of world")})
    for rank, note in ((1, waiting), (2, late)):
        notes.append(f"moe_ft/stopped/{event_log.incarnation}", [rank, note])
    report._report("RuntimeError: lost", LOST, wait)
    (verdict,) = verdicts_in(event_log)
    assert verdict["ranks"] == [2]
    assert verdict["waits"] == (
        f"ranks 0-1 wait in {wait}; rank 2 did not join all_reduce of world (number 8)"
    )
    written = event_log.directory / "rank_00000.collectives.json"
    assert joined(written.read_bytes()) == {"0": (8, "all_reduce of world")}


def test_rank_that_hangs_leaves_a_note_from_another_thread(
    store: dist.Store, event_log: EventLog
) -> None:
    report = FailureReport(CONFIG, LOOP, event_log, on_sigterm=False)
    report.tell_of_hang("too early to know anybody")
    report._job_rank, report._processes = find_job_rank(), JobProcesses(token="the token")
    report.tell_of_hang("no progress")
    (note,) = dict(SignedStore(store, lambda: "the token").values(report._key)).values()
    failure = Failure.of(note["failure"])
    assert (failure.kind, failure.what, failure.iteration) == (FailureKind.HANG, "no progress", 5)
