"""A rank's side of the storage tier: asks the node's writer process, watches it, starts it again if it dies.

The writer itself is engine/persist/writer.py. It is watched by a thread of the lowest rank of each node.
"""

import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from moe_ft.engine.background import BackgroundPart, EventQueue, PhaseHook
from moe_ft.engine.clock import Clock
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.requests import (
    RESULT,
    PersistRequest,
    PersistResult,
    WriterSettings,
    announced_path,
    confirmed_path,
    notice_path,
    request_path,
    result_path,
)
from moe_ft.engine.persist.writer import HEARTBEAT_NAME
from moe_ft.faults import Phase
from moe_ft.files.private_files import make_private, write_atomically
from moe_ft.files.progress import SLOWEST_BYTES_PER_S
from moe_ft.processes import command_of

_HEARTBEAT_STALE_S = 10.0
_SUPERVISION_S = 0.25
_MAX_QUICK_RESTARTS = 5
_RESTART_DELAY_S = 60.0
_MIN_DEADLINE_S = 120.0
_RANK_DEADLINE_S = 0.2  # to look at a rank's index, read it and remove the files of an old one
_END_S = 2.0
_START_S = 30.0
_HEALTHY_S = 600.0  # a writer that lived this long may be restarted as often as a new one
_RESTART_NAME = "restart"
_LOG_NAME = "writer.log"


def persist_deadline_s(num_bytes: int, num_ranks: int = 0) -> float:
    """Return how long writing, reading back, and a manifest of ranks may take before it counts as failed."""
    return _MIN_DEADLINE_S + 2 * num_bytes / SLOWEST_BYTES_PER_S + num_ranks * _RANK_DEADLINE_S


class PersistClient:
    """Hands regions of one rank to the writer. Owned by the training thread.

    Attributes:
        iteration: of the region that is being written, None if there is none.
        written: of the last region, once this rank's part is on storage and has only to be read back.
        has_lost_previous: whether the last one failed because the checkpoint that it builds on is gone.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        reports: EventQueue,
        phase_hook: PhaseHook,
        clock: Clock,
        num_ranks: int = 1,
    ) -> None:
        self._clock = clock
        self._directory = directory
        self._rank = rank
        self._num_ranks = num_ranks
        self._reports = reports
        self._phase_hook = phase_hook
        self._deadline_s = 0.0
        self._number = 0  # of the last request
        self.iteration: int | None = None
        self.written: int | None = None
        self._written_s = 0.0
        self.has_failed = self.has_lost_previous = False
        self.last_seconds = 0.0

    def start(self) -> None:
        """Forget requests and results of an earlier start."""
        make_private(self._directory)
        for path in (announced_path, request_path, notice_path, result_path):
            path(self._directory, self._rank).unlink(missing_ok=True)
        if self._rank == 0:
            confirmed_path(self._directory).unlink(missing_ok=True)

    def confirm(self, index: str) -> None:
        """Tell rank 0's writer which checkpoint all ranks have read back, by this rank's index in it."""
        if self._rank == 0:
            with suppress(OSError):  # older ones stay until the next one
                write_atomically(confirmed_path(self._directory), index.encode())

    def announce(self, tag: str, region: Region, iteration: int) -> None:
        """Have the writer begin with a region that is committed and may be submitted. Any thread.

        The region may change at any time: then what was written of it is not used.
        """
        request = self._request(region, iteration, tag)
        with suppress(OSError):
            path = announced_path(self._directory, self._rank)
            write_atomically(path, msgspec.json.encode(request))

    def submit(
        self,
        region: Region,
        rotating: Sequence[str],
        previous: str,
        tag: str,
        rotating_bytes: int = 0,
    ) -> None:
        """Have a committed snapshot written; its region must not change until `poll` says that this is over.

        Args:
            rotating: units in the pool that are written too; their slots must not change either.
            previous: this rank's index of the checkpoint on storage that holds the others.
        """
        assert self.iteration is None and region.iteration is not None
        num_bytes = region.num_bytes + rotating_bytes
        allowed_s = persist_deadline_s(num_bytes, self._num_ranks if self._rank == 0 else 0)
        self._deadline_s = self._clock.monotonic() + allowed_s
        self._number += 1
        request = msgspec.structs.replace(
            self._request(region, region.iteration, tag),
            rotating=tuple(rotating),
            previous=previous,
            deadline_s=allowed_s,
            number=self._number,
        )
        self.iteration = region.iteration
        self.has_failed = False
        self.written = None
        try:
            announced_path(self._directory, self._rank).unlink(missing_ok=True)
            write_atomically(
                request_path(self._directory, self._rank), msgspec.json.encode(request)
            )
        except OSError as error:
            self._reports.degraded(
                BackgroundPart.PERSIST, region.iteration, f"cannot ask the writer: {error}"
            )
            self._deadline_s = 0.0
            return
        self._phase_hook(Phase.PERSIST, region.iteration)

    def _request(self, region: Region, iteration: int, tag: str) -> PersistRequest:
        return PersistRequest(
            rank=self._rank,
            iteration=iteration,
            index=str(region.index_path),
            data=str(region.data_path),
            rotating=(),
            previous="",
            tag=tag,
            writes_manifest=self._rank == 0,
            deadline_s=0.0,
        )

    def poll(self, *, can_go_on: bool = True) -> bool:
        """Return whether a region was written and read back just now, or nobody will do that any more.

        It is given up if it `can_go_on` no longer, because another rank could not write its part.
        """
        iteration = self.iteration
        if iteration is None:
            return False
        result = self._take(result_path)  # first: the notice was there before it
        if (notice := self._take(notice_path)) is not None:
            self._note_written(iteration, notice)
        if result is not None:
            self.has_lost_previous = result.has_lost_previous
            if result.error:
                self.written = None
                self._fail(iteration, result.error)
            else:
                self.last_seconds = self._written_s + result.seconds
                fields = {"bytes": result.num_bytes, "seconds": result.seconds}
                self._reports.add("read_back", iteration, **fields)
        elif self._clock.monotonic() > self._deadline_s:
            self.has_failed = True
            if self._deadline_s:
                self._fail(iteration, "the writer did not finish in time")
            with suppress(OSError):
                request_path(self._directory, self._rank).unlink(missing_ok=True)
                # The writer may still read this region, which is about to be overwritten: kill it.
                (self._directory / _RESTART_NAME).touch()
        elif not can_go_on:
            self._fail(iteration, "another rank could not write its part, or read it back")
            with suppress(OSError):
                request_path(self._directory, self._rank).unlink(missing_ok=True)
        else:
            return False
        self.iteration = None
        return True

    def _note_written(self, iteration: int, notice: PersistResult) -> None:
        self.written = iteration
        self._written_s = notice.seconds
        if notice.warning:
            self._reports.degraded(BackgroundPart.PERSIST, iteration, notice.warning)
        self._reports.add(
            "persist",
            iteration,
            bytes=notice.num_bytes,
            seconds=notice.seconds,
            num_units=notice.num_units,
            path=notice.path,
        )

    def _fail(self, iteration: int, reason: str) -> None:
        self.has_failed = True
        self._reports.degraded(BackgroundPart.PERSIST, iteration, reason)

    def _take(self, path_for: Callable[[Path, int], Path]) -> PersistResult | None:
        """Return what the writer has told of the last request, once; None if there is nothing."""
        path = path_for(self._directory, self._rank)
        try:
            content = path.read_bytes()
            path.unlink()
            result = RESULT.decode(content)
        except (OSError, ValueError):
            return None
        return result if result.number == self._number else None


class WriterSupervisor:
    """Starts the node's writer process, and starts it again when it dies or falls silent.

    The training thread calls the public methods; a thread of its own watches the process.
    """

    def __init__(
        self,
        directory: Path,
        command: list[str],
        reports: EventQueue,
        clock: Clock,
        settings: WriterSettings | None = None,
    ) -> None:
        """Take a command, and the settings that its process first reads from its standard input."""
        self._clock = clock
        self._directory = directory
        self._command = command
        self._reports = reports
        self._settings = b"" if settings is None else msgspec.json.encode(settings) + b"\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._should_end = threading.Event()

    def start(self) -> None:
        """Start the writer, and the thread that watches it."""
        make_private(self._directory)
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._supervise, args=(started,), name="moe_ft-writer", daemon=True
        )
        self._thread.start()
        self._clock.wait(started, _START_S)

    def _supervise(self, started: threading.Event) -> None:
        # The writer dies with the thread that started it, so this one starts it and stays.
        num_restarts = 0
        while True:
            launched_s = self._clock.monotonic()
            try:
                self._launch()
            except OSError as error:
                reason = f"cannot start: {error}"
            else:
                started.set()
                reason = self._watch()
            started.set()
            if self._should_end.is_set():
                return
            num_restarts = (
                0 if self._clock.monotonic() - launched_s > _HEALTHY_S else num_restarts + 1
            )
            delay_s = 0.0 if num_restarts <= _MAX_QUICK_RESTARTS else _RESTART_DELAY_S
            then = f"it is started again in {delay_s:.0f} s" if delay_s else "it is started again"
            self._reports.degraded(BackgroundPart.WRITER, 0, f"the writer process {reason}; {then}")
            if self._clock.wait(self._should_end, delay_s):
                return

    def _launch(self) -> None:
        for name in (HEARTBEAT_NAME, _RESTART_NAME):
            (self._directory / name).unlink(missing_ok=True)
        # Not the rank's output: a launcher waits until every holder of its pipe has closed it.
        with (self._directory / _LOG_NAME).open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, bufsize=0
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is noticed at once
            self._process.stdin.write(self._settings)

    def _watch(self) -> str:
        """Return why the writer has ended, when it has."""
        assert self._process is not None
        heartbeat = self._heartbeat()
        heard_s = self._clock.monotonic()
        while not self._clock.wait(self._should_end, _SUPERVISION_S):
            if (code := self._process.poll()) is not None:
                return f"ended with code {code}"
            if (now := self._heartbeat()) != heartbeat:
                heartbeat, heard_s = now, self._clock.monotonic()
            if (self._directory / _RESTART_NAME).exists():
                self._kill()
                return "did not finish in time and was killed"
            if self._clock.monotonic() - heard_s > _HEARTBEAT_STALE_S:
                self._kill()
                return f"gave no sign of life for {_HEARTBEAT_STALE_S:.0f} s and was killed"
        return "was told to end"

    def _heartbeat(self) -> int | None:
        """Return what changes with every sign of life: a time stamp that is compared with no clock."""
        try:
            return (self._directory / HEARTBEAT_NAME).stat().st_mtime_ns
        except OSError:
            return None

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel until storage answers
            self._process.wait(_END_S)

    def close(self) -> None:
        """End the writer."""
        self._should_end.set()
        if self._thread is not None:
            self._thread.join(2 * _END_S)
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._kill()


def writer_command(directory: Path) -> list[str]:
    """Return the command line of a writer process, which then reads WriterSettings from its input."""
    return command_of("moe_ft.engine.persist.writer", str(directory))
