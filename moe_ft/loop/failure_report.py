"""Report of the end of a rank that fails or is told to end: which ranks fell silent, died or hung.

Every rank that stops leaves a note in the job's store (a TCP store, no collective: the groups are broken).
A rank that fails waits a moment for the notes of the others: ranks without a note are the ones to look at. A
rank that is told to end waits for nobody: of those without a note it names the ones whose processes it can
see to be gone. What a log says afterwards is moe_ft/commands/report.py.
"""

import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_ft.cluster.failures import report_failure
from moe_ft.cluster.member import own_assignment, retire_own
from moe_ft.cluster.signed_store import SignedStore, StoreMeeting
from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError, CorruptionError, UnrecoverableError
from moe_ft.events import EventLog, event_path, read_progress
from moe_ft.faults import Phase
from moe_ft.files.progress import call_within
from moe_ft.loop.leaving import JobProcesses, JobRank, find_job_rank, gone_ranks, meet_processes
from moe_ft.loop.listeners import Built, LoopListener, LoopState, RejectedResult
from moe_ft.loop.waits import Joined, collective_of, joined, not_joined, recorded, write_trace
from moe_ft.processes import exit_within
from moe_ft.recovery.failures import failure_of, is_timeout
from moe_ft.saying import say, warn
from moe_ft.verdicts import Failure, FailureKind, Verdict, first_of, verdict_of

_SOURCE_LINE = re.compile(r"\[\S+\.cc:\d+\] ")  # where in gloo's source an error was raised
_STORE_DEADLINE_S = 5.0
_HURRIED_STORE_DEADLINE_S = 1.0  # of a rank that is told to end
_LOOK_S = 0.05
_EXIT_DEADLINE_S = 20.0
_MIN_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Note:
    """Note of one rank, which is JSON in the job's store.

    Attributes:
        failure: fields of a `Failure`.
        wait: the collective that the training thread was in.
        joined: the last collectives of its groups (waits.py).
    """

    timed_out: bool
    failure: Mapping[str, Any]
    wait: str = ""
    joined: Joined = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Notes:
    """Notes of ranks, as far as they are there."""

    silent: tuple[int, ...]  # that left none, and are the ones to look at
    is_first: bool  # to miss any: once is enough to say so
    timed_out: bool  # whether any rank had timed out waiting for another
    verdict: Verdict | None  # if this rank is to tell it


class FailureReport(LoopListener):
    """Reports the exception or the SIGTERM that ends training, once, whichever comes first.

    The training thread reports an exception; the process ends soon after. A thread reports SIGTERM, which
    launchers send to all ranks when one has died, and then ends the process. SystemExit, which all of
    Megatron's --exit-* flags use, is not a failure. Nor is a refusal: it is the same on all ranks.
    """

    def __init__(
        self,
        config: MoeFtConfig,
        loop: LoopState,
        event_log: EventLog,
        *,
        on_sigterm: bool,
        before_report: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen to nothing yet.

        Args:
            on_sigterm: False leaves SIGTERM alone, for --exit-signal-handler.
            before_report: called after SIGTERM, before anything else.
        """
        self._grace_s = config.fault.fault_report_grace_s
        self._has_log = config.observability.event_log is not None
        self._loop = loop
        self._log = event_log
        self._sigterm = _Sigterm(self._report_sigterm) if on_sigterm else None
        self._before_report = before_report
        self._lock = threading.Lock()
        self._has_reported = False
        self._told_to_end = threading.Event()
        self._training_thread = threading.get_ident()
        self._processes = JobProcesses()
        self._job_rank: JobRank | None = None

    def start(self) -> None:
        """Listen for SIGTERM."""
        if self._sigterm is not None:
            self._sigterm.start()

    def after_setup(self, built: Built) -> None:
        """Learn which processes of the job run on this machine. Called by all ranks."""
        if dist.is_initialized():
            # On GPUs a breakpoint aborts the groups first, and nothing but the store is left.
            self._job_rank = find_job_rank()
            self._processes = meet_processes()

    def failed(self, error: Exception) -> None:
        """Report an exception, unless it is a refusal; the process ends within a deadline from now on."""
        if isinstance(error, ConfigError | UnrecoverableError):
            return
        retire_own()  # the launcher restarts a job that fails by itself
        exit_within(_EXIT_DEADLINE_S + self._grace_s)  # broken groups may keep it from exiting
        text = _SOURCE_LINE.sub("", " ".join(str(error).split()))
        failure = failure_of(error, **self._place())
        if isinstance(error, CorruptionError):
            # All ranks raise it, also those that compute as they must. The law knows already.
            if failure.rank not in error.ranks:
                failure = replace(failure, kind=FailureKind.NETWORK)
        else:
            _tell_law(failure)
        innermost = deque(traceback.walk_tb(error.__traceback__), maxlen=1)
        wait = collective_of(innermost[0][0]) if innermost else ""
        self._report(f"{type(error).__name__}: {text[:300]}", failure, wait, is_timeout(error))

    def tell_of_hang(self, what: str) -> None:
        """Report that the training thread hangs, for which this process ends next. Any thread."""
        failure = Failure(kind=FailureKind.HANG, what=what, time_s=time.time(), **self._place())
        _tell_law(failure)
        own, processes = self._job_rank, self._processes
        if own is not None:
            note = asdict(
                _Note(timed_out=False, failure=asdict(failure), joined=joined(recorded()))
            )
            store = SignedStore(own.store, lambda: processes.token)
            with suppress(RuntimeError, OSError):
                call_within(
                    lambda: store.append(self._key, [own.rank, note]),
                    _STORE_DEADLINE_S,
                    "the store",
                )

    @property
    def _key(self) -> str:
        return f"moe_ft/stopped/{self._log.incarnation}"

    def _place(self) -> dict[str, Any]:
        """Return where this rank is: fields of a `Failure`."""
        loop, assignment = self._loop, own_assignment()
        is_recovering = loop.phase is Phase.SETUP or loop.is_replaying
        return {
            "rank": self._log.rank,
            "iteration": loop.iteration,
            "section": "recovery" if is_recovering else loop.section.value,
            "node": assignment.node if assignment else socket.gethostname(),
        }

    def tell_of_replaced(self, failure: Failure, error: Exception) -> None:
        """Report an exception for which this rank alone is replaced; its process ends next."""
        loop, text = self._loop, "".join(traceback.format_exception(error))
        warn(
            f"rank {failure.rank} stopped in iteration {loop.iteration}, phase {loop.phase}, and is to be "
            f"replaced: {failure.what}\n{text}"
        )
        self._log.write(
            "stopped",
            loop.iteration,
            phase=loop.phase.value,
            reason=failure.what,
            torn=loop.is_torn,
            silent_ranks=None,
            timed_out=False,
            is_replaced=True,
        )

    def reject(self, rejected: RejectedResult) -> None:
        """Name what Megatron's checks have rejected, and report the end of training if that follows."""
        loop, code = self._loop, rejected.exit_code
        if rejected.check:
            warn(f"rank {self._log.rank}, iteration {loop.iteration}: {rejected}")
            self._log.write(
                "rejected",
                loop.iteration,
                result=rejected.result,
                check=rejected.check,
                exit_code=code,
            )
        if code:
            retire_own()
            what, kind = f"{rejected}: exit code {code}", FailureKind.REJECTED
            self._report(what, Failure(kind=kind, what=what, **self._place()))

    def close(self) -> None:
        """Give SIGTERM back, except after a failure.

        The launcher's SIGTERM may come then, and must end every rank in the same way.
        """
        if self._sigterm is not None and not self._has_reported:
            self._sigterm.close()

    def _report_sigterm(self) -> None:
        retire_own()
        with suppress(Exception):  # the process ends in any case
            self._before_report()
        self._told_to_end.set()  # ends the wait of a report that is under way
        reason = "SIGTERM: told to end, by the launcher if another rank failed"
        told = Failure(kind=FailureKind.TIME_LIMIT, what="told to end", **self._place())
        frame = sys._current_frames().get(self._training_thread)
        self._report(reason, told, collective_of(frame))

    def _report(
        self, reason: str, failure: Failure, wait: str = "", timed_out: bool = False
    ) -> None:
        """Print and log why this rank stops, and which other ranks gave no sign of life. Any thread."""
        with self._lock:  # the second caller waits until the first has finished
            if not self._has_reported:
                self._has_reported = True
                trace = self._keep_trace(failure)
                note = _Note(
                    timed_out=timed_out,
                    failure=asdict(replace(failure, time_s=time.time())),
                    wait=wait,
                    joined=joined(trace),
                )
                self._write_report(reason, note)

    def _keep_trace(self, failure: Failure) -> bytes:
        """Return what torch has recorded of collectives, and write it if one of them has failed."""
        trace = recorded()
        if self._log.is_open and failure.kind is FailureKind.NETWORK:
            with suppress(OSError, ValueError):  # an addition to the verdict
                path = event_path(self._log.directory, failure.rank)
                write_trace(path.with_suffix(".collectives.json"), trace)
        return trace

    def _write_report(self, reason: str, note: _Note) -> None:
        loop, rank, directory = self._loop, self._log.rank, self._log.directory
        warn(f"rank {rank} stopped in iteration {loop.iteration}, phase {loop.phase}: {reason}")
        if self._has_log:
            say(f"rank {rank}: the events are in {directory}")
        own = find_job_rank() or self._job_rank
        notes = None if own is None else self._exchange_notes(own, note)
        silent = None
        if notes is not None:
            silent = list(notes.silent)
            if notes.is_first:
                warn(f"rank {rank} {_describe(silent, notes.timed_out, directory)}")
        elif own is not None:
            seen = _last_seen(0, directory)
            warn(
                f"rank {rank} could not ask the others: the job's store does not answer (rank 0{seen} keeps "
                "it, unless the launcher does)"
            )
        if notes is not None and (verdict := notes.verdict) is not None:
            warn(f"verdict: {verdict}")
            self._log.write(
                "verdict",
                verdict.first.iteration,
                kind=verdict.first.kind.value,
                ranks=list(verdict.ranks),
                node=verdict.first.node,
                section=verdict.first.section,
                what=verdict.first.what,
                waits=verdict.waits,
                restart=verdict.restart,
                words=str(verdict),
            )
        self._log.write(
            "stopped",
            loop.iteration,
            phase=loop.phase.value,
            reason=reason,
            torn=loop.is_torn,
            silent_ranks=silent,
            timed_out=notes.timed_out if notes else note.timed_out,
        )

    def _exchange_notes(self, own: JobRank, note: _Note) -> _Notes | None:
        """Exchange notes with the other ranks that stop; None if the store does not answer."""
        answer: list[_Notes] = []

        def exchange() -> None:
            # The store's host may be what died: the caller then says that it does not answer.
            with suppress(RuntimeError, OSError):
                answer.append(self._exchange(own, note))

        # A store operation can block for minutes when its host is gone: give it a thread, not our time.
        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        deadline_s = time.monotonic() + self._grace_s + _STORE_DEADLINE_S
        while thread.is_alive() and time.monotonic() < deadline_s:
            if self._told_to_end.is_set():
                deadline_s = min(deadline_s, time.monotonic() + _HURRIED_STORE_DEADLINE_S)
                thread.join(_HURRIED_STORE_DEADLINE_S)
            thread.join(_LOOK_S)
        return answer[0] if answer else None

    def _exchange(self, own: JobRank, note: _Note) -> _Notes:
        processes, is_told = self._processes, self._told_to_end
        store = SignedStore(own.store, lambda: processes.token)
        rank, world_size = own.rank, own.world_size
        meeting = StoreMeeting(store, rank, world_size, least_poll_s=_MIN_POLL_S)
        key = self._key
        meeting.exchange(key, asdict(note), self._grace_s, is_told.wait)
        # A rank that is told to end does not wait until all others have had the time to leave a note. Look at
        # processes before notes: what has ended by now has left its note, if it leaves one.
        suspects = gone_ranks(processes.pids) if is_told.is_set() else frozenset(range(world_size))
        said = {**meeting.said(key), rank: asdict(note)}
        silent = tuple(sorted(suspects - said.keys()))
        verdict = _verdict_of({each: _Note(**said[each]) for each in sorted(said)}, silent)
        # A rank that is told to end knows little of other machines: it is silent, unless it is the last one.
        is_sure = not verdict.is_caused or not is_told.is_set() or len(said) == world_size
        notes = _Notes(
            silent=silent,
            # Not the lowest that was heard: it may be told to end before it misses any. Where a cause is
            # known, the others wait for that rank.
            is_first=verdict.first.rank in silent and store.set_first(f"{key}/first", rank) == rank,
            timed_out=any(each["timed_out"] for each in said.values()),
            verdict=verdict
            if is_sure and store.set_first(f"{key}/verdict", rank) == rank
            else None,
        )
        if rank == 0:
            time.sleep(2 * meeting.poll_s)  # it may keep the store: let the others read
        return notes


def _tell_law(failure: Failure) -> None:
    if (assignment := own_assignment()) is not None:
        report_failure(assignment, failure)


def _verdict_of(notes: Mapping[int, _Note], silent: Sequence[int]) -> Verdict:
    """Return the verdict that some ranks' notes give, of which there is one at least."""
    failures = [Failure.of(each.failure) for each in notes.values()]
    first = first_of(failures)
    assert first is not None
    # Ranks that are told to end are where they happen to be.
    knows = first.kind is not FailureKind.TIME_LIMIT
    return verdict_of(
        failures,
        silent,
        timed_out=any(each.timed_out for each in notes.values()),
        waits={rank: each.wait for rank, each in notes.items() if each.wait and rank != first.rank},
        absent=not_joined({rank: each.joined for rank, each in notes.items()}) if knows else {},
    )


class _Sigterm:
    """A thread that acts on SIGTERM: a Python handler cannot run while a collective blocks."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._is_listening = False

    def start(self) -> None:
        """Take SIGTERM over. Main thread."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno())
        self._old_handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._is_listening = True
        os.register_at_fork(after_in_child=self._forget_in_child)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        while number := self._reader.recv(1):
            if number[0] == signal.SIGTERM:
                self._act()
                sys.stdout.flush()
                os._exit(128 + signal.SIGTERM)

    def _forget_in_child(self) -> None:
        """Keep forked processes, such as data loader workers, from acting as this rank."""
        if self._is_listening:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def close(self) -> None:
        """Give SIGTERM back. Main thread."""
        if self._is_listening:
            self._is_listening = False
            signal.set_wakeup_fd(self._old_wakeup_fd)
            signal.signal(signal.SIGTERM, self._old_handler)
            self._writer.close()


def _describe(silent: list[int], timed_out: bool, log_directory: Path) -> str:
    """Name the silent ranks, where each was last seen, and what that means."""
    names = ", ".join(f"{rank}{_last_seen(rank, log_directory)}" for rank in silent)
    fate = "hung: the other ranks timed out waiting" if timed_out else "died"
    if len(silent) == 1:
        return f"heard nothing from rank {names}, which probably {fate}"
    return f"heard nothing from ranks {names}: at least one of them probably {fate}"


def _last_seen(rank: int, log_directory: Path) -> str:
    progress = read_progress(log_directory, rank)
    return f" (last in iteration {progress.iteration}, {progress.phase})" if progress else ""
