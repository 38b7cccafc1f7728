"""The writer process: copies committed regions of its node's ranks to storage. See engine/persist/client.py.

Requests and results are small files in a directory on tmpfs, so that either side may die at any moment. Runs
with low CPU and I/O priority, writes a heartbeat, and ends when the rank that started it does. No torch.
"""

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import filelock
import msgspec
import psutil

from moe_ft.engine.persist.manifests import missing_indexes, write_manifest
from moe_ft.engine.persist.retention import Retention
from moe_ft.engine.persist.soundness import check_data, check_is_finite
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.engine.persist.stored_file import (
    PreviousCheckpointError,
    StoredFile,
    assemble,
    read_previous,
)
from moe_ft.errors import CorruptStateError
from moe_ft.files.private_files import write_atomically
from moe_ft.files.storage import Storage, rank_path
from moe_ft.format.encoding import decode, encode
from moe_ft.format.index import Index, check_units
from moe_ft.processes import die_with_parent
from moe_ft.saying import choose_format, warn

HEARTBEAT_NAME = "heartbeat"
_POLL_S = 0.02
_LONGEST_STORAGE_POLL_S = 0.1
_HEARTBEAT_S = 0.5
_MAX_THREADS = 4
_NICENESS = 10  # with 19 a writer starves for seconds where all cores are busy
_LOWEST_BEST_EFFORT = 7  # the idle class waits for as long as anybody else uses the disk
_SIGNALS_FOR_RANKS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),  # Megatron's --exit-signal, usually
)


class PersistRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write one rank's region to storage.

    Attributes:
        index, data: absolute paths of the region's files.
        rotating: units in the pool that are written in addition to the region.
        previous: this rank's index on storage, relative to the persist directory, whose checkpoint holds
            the other units that the region does not; empty if there is none.
        writes_manifest: also wait for the other ranks' indexes and write the manifest (rank 0).
        deadline_s: how long it may take; nobody waits any longer. Each side counts on its own clock.
        number: of the rank's request, from 1: one that is made again is another one, with its own result.
    """

    rank: int
    iteration: int
    index: str
    data: str
    rotating: tuple[str, ...]
    previous: str
    tag: str
    writes_manifest: bool
    deadline_s: float
    number: int = 1


class WriterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a writer's standard input: not its arguments, which everybody may read.

    Attributes:
        url: of the persist directory; may hold a password.
        lock_owner: of the start that has the lock of the persist directory; empty for a writer that does not
            serve rank 0, the only one that harms others by writing manifests and deleting.
    """

    url: str
    keep: int
    parent: int
    lock_owner: str
    keeps_whole: bool = False
    log_format: str = "text"


class PersistResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a request; it succeeded if the error is empty."""

    rank: int
    iteration: int
    error: str
    num_bytes: int
    num_units: int
    seconds: float
    path: str
    warning: str = ""
    has_lost_previous: bool = False
    number: int = 1


REQUEST = msgspec.json.Decoder(PersistRequest)
RESULT = msgspec.json.Decoder(PersistResult)
_SETTINGS = msgspec.json.Decoder(WriterSettings)


def request_path(directory: Path, rank: int) -> Path:
    """Return where a rank's request lies until it is done."""
    return directory / f"request_{rank:05d}.json"


def result_path(directory: Path, rank: int) -> Path:
    """Return where a rank's result lies until it is read."""
    return directory / f"result_{rank:05d}.json"


class PersistWorker:
    """Serves the requests in a directory. Runs in a process of its own."""

    def __init__(
        self,
        directory: Path,
        storage: Storage,
        keep: int,
        lock: StorageLock | None = None,
        *,
        keeps_whole: bool = False,
    ) -> None:
        """Take a directory of requests; the lock is None if it is not for this writer to see to."""
        self._directory, self._storage, self._lock = directory, storage, lock
        self._retention = Retention(storage, keep, self._check_lock, keeps_whole=keeps_whole)
        self._mappings: dict[Path, tuple[tuple[int, int], memoryview]] = {}
        self._running: dict[Path, tuple[bytes, Future[None]]] = {}

    def run(self, should_end: threading.Event) -> None:
        """Serve until told to end."""
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            while not should_end.wait(_POLL_S):
                for path in sorted(self._directory.glob("request_*.json")):
                    self._start(path, pool)

    def _start(self, path: Path, pool: ThreadPoolExecutor) -> None:
        try:
            content = path.read_bytes()
        except OSError:
            return
        before = self._running.get(path)
        if before is not None and (before[0] == content or not before[1].done()):
            return
        self._running[path] = (content, pool.submit(self._serve, path, content))

    def _serve(self, path: Path, content: bytes) -> None:
        try:
            request = REQUEST.decode(content)
        except ValueError:
            return
        start = time.perf_counter()
        index, error, warning, has_lost_previous = None, "", "", False
        try:
            index, warning = self.persist(request, is_wanted=path.exists)
        except Exception as failure:  # any file system may raise anything; the rank says it
            error = f"{type(failure).__name__}: {failure}"
            has_lost_previous = isinstance(failure, PreviousCheckpointError)
        result = PersistResult(
            rank=request.rank,
            iteration=request.iteration,
            error=error,
            num_bytes=index.file_bytes if index else 0,
            num_units=len(index.units) if index else 0,
            seconds=time.perf_counter() - start,
            path=self._storage.url,
            warning=warning,
            has_lost_previous=has_lost_previous,
            number=request.number,
        )
        with suppress(OSError):  # the memory directory is gone: so is whoever asked
            # First the request, or the next one, which a result invites, might be removed unserved.
            if path.read_bytes() == content:
                path.unlink()
            write_atomically(
                result_path(self._directory, request.rank), msgspec.json.encode(result)
            )

    def persist(
        self, request: PersistRequest, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[Index, str]:
        """Copy a region to storage: data, which is read back, then the index; rank 0 writes the manifest.

        Returns the index on storage, and what went wrong afterwards.

        Args:
            is_wanted: returns False when the wait for other ranks is in vain.

        Raises:
            CorruptStateError: if the region does not match its index, another one is in its place, its
                numbers are not finite, or storage has something else than was written.
            LockLostError: if the persist directory is another job's by now.
            OSError: if storage fails, or the other ranks do not get there before the deadline.
        """
        deadline_s = time.monotonic() + request.deadline_s
        self._check_lock()
        index = decode(Path(request.index).read_bytes(), Index, request.index)
        # Versions that only peers have are not written; their slots may be filled again meanwhile.
        index = msgspec.structs.replace(index, retained=msgspec.UNSET)
        if (index.rank, index.iteration) != (request.rank, request.iteration):
            raise CorruptStateError(f"{request.index} holds iteration {index.iteration}")
        if not index.is_whole:
            raise CorruptStateError(f"{request.index} holds only a part of a window")
        data_path = rank_path(index.iteration, index.rank, request.tag, "safetensors")
        index_path = rank_path(index.iteration, index.rank, request.tag, "json")
        if request.writes_manifest:  # one rank for all: it reads every manifest
            self._retention.remove_incomplete(index.iteration)
        written = self._written(index_path, index)
        if written is None:
            name = data_path.rpartition("/")[2]
            previous = read_previous(self._storage, request.previous)
            stored = assemble(index, request.rotating, previous, name)
            written = stored.index
            try:
                self._write(index, stored, Path(request.data), data_path)
                self._read_back(written, data_path)
                self._storage.write_atomically(index_path, encode(written))
            except Exception:
                with suppress(Exception):  # a full disk must not stay full of what failed
                    if not self._storage.exists(index_path):
                        self._storage.remove(data_path)
                raise
        if request.writes_manifest:
            return written, self._complete(index, request.tag, deadline_s, is_wanted)
        return written, ""

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _written(self, index_path: str, index: Index) -> Index | None:
        """Return what a writer that died before its answer has written of this snapshot, if it has."""
        if not self._storage.exists(index_path):
            return None
        try:
            found = self._storage.index(index_path)
        except CorruptStateError:
            return None
        own = {name: unit.checksum for name, unit in index.units.items() if not unit.file}
        there = {name: unit.checksum for name, unit in found.units.items() if name in own}
        is_same = own == there and (found.identity, found.records, found.compute) == (
            index.identity,
            index.records,
            index.compute,
        )
        return found if is_same else None

    def _write(self, index: Index, stored: StoredFile, data: Path, data_path: str) -> None:
        files = {"", *stored.from_file.values()}
        contents = {file: self._mapped(data.parent / file if file else data) for file in files}
        for file, content in contents.items():
            if not file and len(content) < index.file_bytes:
                raise CorruptStateError(f"{data} is shorter than its index says")
        written = [
            (name, unit)
            for name, unit in index.entries()
            if not unit.file or name in stored.from_file
        ]
        check_units(index, contents, str(data), written)
        try:
            for name, unit in written:
                content = contents[unit.file][unit.offset : unit.offset + unit.num_bytes]
                check_is_finite(name, unit, content)
        except CorruptStateError as error:
            # As a checkpoint it would take the place of those from which training can continue.
            raise CorruptStateError(
                f"iteration {index.iteration} is not written to storage: {error}"
            ) from error
        self._storage.write(data_path, stored.pieces(index, contents))

    def _read_back(self, index: Index, data_path: str) -> None:
        """Read what was written: older checkpoints are deleted for it, and an index says that it is right.

        Units in the files of older checkpoints were read when those were written.
        """
        try:
            check_data(self._storage, index, data_path, with_older=False)
        except CorruptStateError as error:
            raise CorruptStateError(
                f"iteration {index.iteration} is not on storage as it was written, and older checkpoints "
                f"stay: {error}"
            ) from error

    def _mapped(self, path: Path) -> memoryview:
        """Return a region's bytes. Regions are reused, and mapping one again costs more than reading it."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file_id = (status.st_ino, status.st_size)
            known = self._mappings.get(path)
            if known is None or known[0] != file_id:
                # Not closed by hand: the traceback of a failed write may hold a part of it.
                mapping = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                known = self._mappings[path] = (file_id, mapping)
        return known[1]

    def _complete(
        self, index: Index, tag: str, deadline_s: float, is_wanted: Callable[[], bool]
    ) -> str:
        """Wait until every rank's index is there, write the manifest, delete what is too old.

        Returns why nothing could be deleted, if so: that makes the checkpoint no less complete.
        """
        world_size = index.identity.world_size
        waiting, poll_s = set(range(world_size)), _POLL_S
        while True:
            waiting = missing_indexes(self._storage, index.iteration, tag, waiting)
            if not waiting:
                break
            if time.monotonic() > deadline_s or not is_wanted():
                raise TimeoutError(
                    f"ranks {sorted(waiting)[:8]} did not write their part of iteration "
                    f"{index.iteration} in time"
                )
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_STORAGE_POLL_S)
        if not is_wanted():
            raise TimeoutError(f"iteration {index.iteration} was given up")
        self._check_lock()
        manifest = write_manifest(self._storage, index.iteration, tag, world_size)
        try:
            self._retention.retain(manifest)
        except Exception as error:  # as any file system likes
            return f"old checkpoints cannot be removed: {type(error).__name__}: {error}"
        return ""


def _read_settings() -> WriterSettings:
    """Return what the parent says; end with the parent, also if this process is stopped then."""
    die_with_parent()
    line = sys.stdin.buffer.readline()
    settings = _SETTINGS.decode(line) if line else None
    if settings is None or os.getppid() != settings.parent:
        os._exit(0)

    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(0)  # the pipe's other end is closed

    threading.Thread(target=watch, daemon=True).start()
    return settings


def _lower_priority() -> None:
    os.nice(_NICENESS)
    with suppress(psutil.Error, OSError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, _LOWEST_BEST_EFFORT)


def _beat(directory: Path) -> None:
    path = directory / HEARTBEAT_NAME
    while True:
        try:
            path.touch()
        except OSError:
            os._exit(0)  # the node's memory directory is gone
        time.sleep(_HEARTBEAT_S)


def main(directory: str) -> None:
    """Serve a node's ranks until the parent ends."""
    for number in _SIGNALS_FOR_RANKS:  # launchers and SLURM signal everyone; the parent decides
        signal.signal(number, signal.SIG_IGN)
    settings = _read_settings()
    choose_format(settings.log_format)
    _lower_priority()
    place = Path(directory)
    # One writer per node: an older start's may have a moment left.
    with filelock.FileLock(place / "writer.lock", mode=0o600):
        threading.Thread(target=_beat, args=(place,), daemon=True).start()
        storage = Storage(settings.url)
        lock = StorageLock(storage, settings.lock_owner) if settings.lock_owner else None
        if lock is not None:
            lock.start(warn)
        worker = PersistWorker(
            place, storage, settings.keep, lock, keeps_whole=settings.keeps_whole
        )
        worker.run(threading.Event())
