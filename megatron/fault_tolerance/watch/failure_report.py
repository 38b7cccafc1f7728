"""Says, when a rank fails or is told to end, which ranks fell silent: died, or hung.

Every rank that stops leaves a note in the job's store (a TCP store, no collective: the groups are broken)
and waits a moment for the notes of the others. Ranks without a note are the ones to look at. What the
notes say afterwards is moe_ft/commands/report.py.
"""

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.fault_tolerance.watch.run import TrainingRun
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.events import read_progress

_SOURCE_LINE = re.compile(r"\[\S+\.cc:\d+\] ")  # where in gloo's source an error was raised
_STORE_DEADLINE_S = 5.0
_EXIT_DEADLINE_S = 20.0
_MIN_POLL_S = 0.1
_MAX_STORE_OPERATIONS_PER_S = 5000  # of all ranks together


@contextmanager
def reporting(run: TrainingRun, *, on_sigterm: bool) -> Iterator[None]:
    """Report an exception or a SIGTERM that ends training.

    An exception passes on, and the process ends soon after. SIGTERM, which launchers send to all ranks
    when one has died, ends the process after the report. SystemExit, which all of Megatron's --exit-*
    flags use, is not an error.

    Args:
        run: what ends.
        on_sigterm: False leaves SIGTERM alone, for --exit-signal-handler.
    """
    reporter = _Reporter(run)
    if on_sigterm:
        reporter.listen_for_sigterm()
    try:
        yield
    except (ConfigError, UnrecoverableError):
        if on_sigterm:
            reporter.stop_listening()
        raise  # a refusal, the same on all ranks: nobody died
    except Exception as error:
        _exit_within(_EXIT_DEADLINE_S + run.config.fault.fault_report_grace_s)
        text = _SOURCE_LINE.sub("", " ".join(str(error).split()))
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        reporter.report(f"{type(error).__name__}: {text[:300]}", timed_out)
        # Still listening: the launcher's SIGTERM, which may come now, shall end every rank alike.
        raise
    except BaseException:
        if on_sigterm:
            reporter.stop_listening()
        raise
    if on_sigterm:
        reporter.stop_listening()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Notes:
    """Which ranks left a note, and whether any of them had timed out waiting for another."""

    heard: frozenset[int]
    timed_out: bool


class _Reporter:
    """Reports once, for whichever comes first: an exception (training thread) or SIGTERM (a thread)."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._reported = False

    def report(self, reason: str, timed_out: bool) -> None:
        """Print and log why this rank stops, and which other ranks gave no sign of life."""
        with self._lock:  # the second caller waits until the first has finished
            if not self._reported:
                self._reported = True
                self._report(reason, timed_out)

    def _report(self, reason: str, timed_out: bool) -> None:
        run = self._run
        rank, log_directory = run.event_log.rank, run.event_log.directory
        _say(f"rank {rank} stopped in iteration {run.iteration}, phase {run.phase}: {reason}")
        if run.config.observability.event_log is not None:
            _say(f"rank {rank}: the events are in {log_directory}")
        notes = _exchange_within_deadline(run, timed_out) if dist.is_initialized() else None
        silent = None
        if notes is not None:
            silent = sorted(set(range(dist.get_world_size())) - notes.heard)
            if silent and rank == min(notes.heard):  # once is enough
                _say(f"rank {rank} {_describe(silent, notes.timed_out, log_directory)}")
        elif dist.is_initialized():
            seen = _last_seen(0, log_directory)
            _say(
                f"rank {rank} could not ask the others: the job's store, which rank 0{seen} keeps "
                "unless the launcher does, does not answer"
            )
        run.event_log.write(
            "stopped",
            run.iteration,
            phase=run.phase.value,
            reason=reason,
            torn=run.is_torn,
            silent_ranks=silent,
            timed_out=notes.timed_out if notes else timed_out,
        )

    def listen_for_sigterm(self) -> None:
        """Let a thread report at SIGTERM: a Python handler cannot run while a collective blocks."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno())
        self._old_handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
        self._listening = True
        os.register_at_fork(after_in_child=self._forget_in_child)
        threading.Thread(target=self._wait_for_sigterm, daemon=True).start()

    def _wait_for_sigterm(self) -> None:
        while number := self._reader.recv(1):
            if number[0] == signal.SIGTERM:
                self.report("SIGTERM: told to end, by the launcher if another rank failed", False)
                sys.stdout.flush()
                os._exit(128 + signal.SIGTERM)

    def _forget_in_child(self) -> None:
        """Keep forked processes, such as data loader workers, from reporting as this rank."""
        if self._listening:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def stop_listening(self) -> None:
        """Give SIGTERM back."""
        self._listening = False
        signal.set_wakeup_fd(self._old_wakeup_fd)
        signal.signal(signal.SIGTERM, self._old_handler)
        self._writer.close()


def _describe(silent: list[int], timed_out: bool, log_directory: Path) -> str:
    """Name the silent ranks, where each was last seen, and what that means."""
    names = ", ".join(f"{rank}{_last_seen(rank, log_directory)}" for rank in silent)
    fate = "hung: the other ranks timed out waiting" if timed_out else "died"
    if len(silent) == 1:
        return f"heard nothing from rank {names}, which probably {fate}"
    return f"heard nothing from ranks {names}, of which at least one probably {fate}"


def _last_seen(rank: int, log_directory: Path) -> str:
    progress = read_progress(log_directory, rank)
    return f" (last in iteration {progress.iteration}, {progress.phase})" if progress else ""


def _exchange_within_deadline(run: TrainingRun, timed_out: bool) -> _Notes | None:
    """Exchange notes with the other ranks that stop; None if the store does not answer."""
    answer: list[_Notes] = []
    grace_s = run.config.fault.fault_report_grace_s

    def exchange() -> None:
        # The store's host may be what died: the caller then says that it does not answer.
        with suppress(RuntimeError, OSError):
            answer.append(_exchange(run.event_log.incarnation, timed_out, grace_s))

    # A store operation can block for minutes when its host is gone: give it a thread, not our time.
    thread = threading.Thread(target=exchange, daemon=True)
    thread.start()
    thread.join(grace_s + _STORE_DEADLINE_S)
    return answer[0] if answer else None


def _exchange(incarnation: int, timed_out: bool, grace_s: float) -> _Notes:
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    prefix = f"moe_ft/stopped/{incarnation}"
    poll_s = max(_MIN_POLL_S, world_size / _MAX_STORE_OPERATIONS_PER_S)
    store.append(f"{prefix}/ranks", f"{rank} ")  # type: ignore[attr-defined]  # missing in its stub
    store.add(f"{prefix}/timed_out", int(timed_out))
    num_stopped = store.add(f"{prefix}/count", 1)
    deadline = time.monotonic() + grace_s
    while num_stopped < world_size and time.monotonic() < deadline:
        time.sleep(poll_s)
        num_stopped = store.add(f"{prefix}/count", 0)
    notes = _Notes(
        heard=frozenset(int(word) for word in store.get(f"{prefix}/ranks").split()),
        timed_out=store.add(f"{prefix}/timed_out", 0) > 0,
    )
    if rank == 0:
        time.sleep(2 * poll_s)  # it may keep the store: let the others read
    return notes


def _exit_within(seconds: float) -> None:
    """End the process after some seconds, also if broken process groups keep it from exiting."""

    def leave() -> None:
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def _say(line: str) -> None:
    print(f"moe_ft: {line}", file=sys.stderr, flush=True)
