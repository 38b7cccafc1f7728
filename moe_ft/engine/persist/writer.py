"""The writer process: copies committed regions of its node's ranks to storage. See engine/persist/client.py.

A rank's file of a checkpoint has its region, some units of the pool, and references to the rest: a unit that
is not written is in the file of an older checkpoint, or has never been written.

Requests and results are small files in a directory on tmpfs, so that either side may die at any moment. Runs
with low CPU and I/O priority, writes a heartbeat, and ends when the rank that started it does. No torch.
"""

import mmap
import os
import posixpath
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import filelock
import msgspec
import psutil

from moe_ft.engine.memory.layout import FileLayout, lay_out
from moe_ft.engine.persist.manifests import find_checkpoint, missing_indexes, write_manifest
from moe_ft.engine.persist.requests import (
    REQUEST,
    SETTINGS,
    PersistRequest,
    PersistResult,
    WriterSettings,
    confirmed_path,
    notice_path,
    result_path,
)
from moe_ft.engine.persist.retention import Retention
from moe_ft.engine.persist.soundness import check_data, check_is_finite
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.errors import CorruptStateError
from moe_ft.files.private_files import write_atomically
from moe_ft.files.storage import Storage, rank_path
from moe_ft.format.encoding import checksum, decode, encode
from moe_ft.format.entries import FileEntry, UnitEntry
from moe_ft.format.index import Index, check_units
from moe_ft.processes import die_with_parent, ignore_signals
from moe_ft.saying import choose_format, warn
from moe_ft.units import Level, parse_unit

HEARTBEAT_NAME = "heartbeat"
_POLL_S = 0.02
_LONGEST_STORAGE_POLL_S = 0.1
_HEARTBEAT_S = 0.5
_MAX_THREADS = 4
_NICENESS = 10  # with 19 a writer starves for seconds where all cores are busy
_LOWEST_BEST_EFFORT = 7  # the idle class waits for as long as anybody else uses the disk


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviousCheckpoint:
    """A rank's index in an older checkpoint."""

    index: Index
    path: str
    checksum: str

    @property
    def data(self) -> str:
        """The path of its data file."""
        return posixpath.join(posixpath.dirname(self.path), self.index.file)


class PreviousCheckpointError(OSError):
    """The older checkpoint that a request builds on cannot be read."""


def read_previous(storage: Storage, path: str) -> PreviousCheckpoint | None:
    """Return what a rank has in an older checkpoint; None without a path.

    Raises PreviousCheckpointError if it, or a file that it names, is not there.
    """
    if not path:
        return None
    try:
        content = storage.read(path)
        index = decode(content, Index, path)
        for file in index.older:
            if not storage.exists(file.data):
                raise FileNotFoundError(file.data)
    except OSError as error:
        raise PreviousCheckpointError(f"{path}: {error}") from error
    return PreviousCheckpoint(index=index, path=path, checksum=checksum(content))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A data file that is to be written, and its index.

    Attributes:
        from_file: the units in it, and in which file in memory each is: empty for the region.
        layout: of the file; None if it is the region as it is.
    """

    index: Index
    from_file: Mapping[str, str]
    layout: FileLayout | None

    def pieces(self, index: Index, contents: Mapping[str, memoryview]) -> Iterator[memoryview]:
        """Yield the file's bytes in order."""
        if self.layout is None:
            yield contents[""][: index.file_bytes]
            return
        yield memoryview(self.layout.header)
        end = len(self.layout.header)
        for place in self.layout.units:
            name = str(place.unit)
            unit = index.units[name]
            yield memoryview(bytes(place.offset - end))  # an alignment gap
            yield contents[self.from_file[name]][unit.offset : unit.offset + unit.num_bytes]
            end = place.offset + place.num_bytes
        yield memoryview(bytes(self.layout.num_bytes - end))


def assemble(
    index: Index, rotating: Sequence[str], previous: PreviousCheckpoint | None, file: str
) -> StoredFile:
    """Decide what a rank's file of a checkpoint holds.

    Args:
        previous: what the rank has in the newest checkpoint; units that are not written are found there.
    """
    chosen = set(rotating)
    written = {name: unit for name, unit in index.units.items() if not unit.file or name in chosen}
    from_file = {name: unit.file for name, unit in written.items()}
    in_pool = index.units.keys() - written.keys()
    older_units: dict[str, UnitEntry] = {}
    if previous is not None:  # it may hold others: parts that belong to another rank now
        older_units = {
            name: msgspec.structs.replace(unit, file=unit.file or previous.data)
            for name, unit in previous.index.units.items()
            if name in in_pool
        }
    files = {unit.file for unit in older_units.values()}
    older = tuple(entry for entry in _files_of(previous) if entry.data in files)
    layout = None
    if any(from_file.values()):
        layout = lay_out(
            (parse_unit(name), Level(unit.level), unit.tensors) for name, unit in written.items()
        )
        written = {
            str(place.unit): msgspec.structs.replace(
                written[str(place.unit)], offset=place.offset, file=""
            )
            for place in layout.units
        }
        index = msgspec.structs.replace(
            index,
            file_bytes=layout.num_bytes,
            header_bytes=len(layout.header),
            header_checksum=checksum(layout.header),
        )
    index = msgspec.structs.replace(index, file=file, units={**older_units, **written}, older=older)
    return StoredFile(index=index, from_file=from_file, layout=layout)


def _files_of(previous: PreviousCheckpoint | None) -> Iterator[FileEntry]:
    if previous is None:
        return
    yield FileEntry(
        rank=previous.index.rank,
        index=previous.path,
        index_checksum=previous.checksum,
        data=previous.data,
        num_bytes=previous.index.file_bytes,
    )
    yield from previous.index.older


class _Ahead(NamedTuple):
    """Data that were written before they were asked for: the index that describes them, empty without any."""

    content: bytes = b""
    seconds: float = 0.0


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
        self._directory = directory
        self._storage = storage
        self._lock = lock
        self._retention = Retention(storage, keep, self._check_lock, keeps_whole=keeps_whole)
        self._mappings: dict[Path, tuple[tuple[int, int], memoryview]] = {}
        self._running: dict[Path, tuple[bytes, Future[None]]] = {}
        self._ahead: dict[int, Future[_Ahead]] = {}  # by rank
        self._warning = ""  # why older checkpoints could not be deleted

    def run(self, should_end: threading.Event) -> None:
        """Serve until told to end."""
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            while not should_end.wait(_POLL_S):
                # First: what its rank has confirmed before is there, and is done before it.
                requests = sorted(self._directory.glob("request_*.json"))
                for path in sorted(self._directory.glob("announced_*.json")):
                    self._start_ahead(path, pool)
                self._start(confirmed_path(self._directory), self._delete_older, pool)
                for path in requests:
                    self._start(path, self._serve, pool)

    def _start(
        self, path: Path, act: Callable[[Path, bytes], None], pool: ThreadPoolExecutor
    ) -> None:
        try:
            content = path.read_bytes()
        except OSError:
            return
        before = self._running.get(path)
        if before is not None and (before[0] == content or not before[1].done()):
            return
        self._running[path] = (content, pool.submit(act, path, content))

    def _serve(self, path: Path, content: bytes) -> None:
        try:
            request = REQUEST.decode(content)
        except ValueError:
            return
        start_s = time.perf_counter()
        notice = result = PersistResult(
            rank=request.rank,
            iteration=request.iteration,
            path=self._storage.url,
            number=request.number,
        )

        def tell(index: Index, seconds: float, warning: str) -> None:
            nonlocal notice, start_s
            start_s = time.perf_counter()
            notice = msgspec.structs.replace(
                result,
                num_bytes=index.file_bytes,
                num_units=len(index.units),
                seconds=seconds,
                warning=warning,
            )
            self._tell(notice_path, notice)

        try:
            self.persist(request, path.exists, tell)
            result = notice
        except Exception as failure:  # any file system may raise anything; the rank says it
            result = msgspec.structs.replace(
                notice,
                error=f"{type(failure).__name__}: {failure}",
                has_lost_previous=isinstance(failure, PreviousCheckpointError),
            )
        with suppress(OSError):  # the memory directory is gone: so is whoever asked
            # First the request, or the next one, which a result invites, might be removed unserved.
            if path.read_bytes() == content:
                path.unlink()
            seconds = time.perf_counter() - start_s
            self._tell(result_path, msgspec.structs.replace(result, seconds=seconds))

    def _tell(self, path_for: Callable[[Path, int], Path], result: PersistResult) -> None:
        with suppress(OSError):
            path = path_for(self._directory, result.rank)
            write_atomically(path, msgspec.json.encode(result))

    def _start_ahead(self, path: Path, pool: ThreadPoolExecutor) -> None:
        with suppress(OSError, ValueError):  # such as of one that was taken back just now
            request = REQUEST.decode(path.read_bytes())
            before = self._ahead.get(request.rank)
            if before is None or before.done():
                path.unlink()
                # Before the request that follows and waits for it: the pool begins in the order given.
                self._ahead[request.rank] = pool.submit(self._write_ahead, request)

    def _write_ahead(self, request: PersistRequest) -> _Ahead:
        """Write the data of a window that this rank has, and perhaps not all ranks.

        Nothing names them before the request. Nobody keeps the region for it meanwhile: whoever fills memory
        again that an index names removes the index first.
        """
        start_s = time.perf_counter()
        with suppress(Exception):  # whatever it is, the request meets it again, and says so
            self._check_lock()
            found, index = _index_of(request)
            data_path = rank_path(index.iteration, index.rank, request.tag, "safetensors")
            stored = assemble(index, (), None, data_path.rpartition("/")[2])
            self._write(index, stored, Path(request.data), data_path)
            if found == _state_of(request.index):
                return _Ahead(encode(stored.index), time.perf_counter() - start_s)
            self._storage.remove(data_path)
        return _Ahead()

    def persist(
        self,
        request: PersistRequest,
        is_wanted: Callable[[], bool] = lambda: True,
        tell: Callable[[Index, float, str], None] = lambda index, seconds, warning: None,
    ) -> tuple[Index, str]:
        """Copy a region to storage: data, then the index; rank 0 writes the manifest. Then read it back.

        A checkpoint is complete with its manifest: whoever recovers verifies each byte. A rank that reads
        other bytes than it wrote takes its index back, without which the manifest is that of no checkpoint.

        Returns the index on storage, and why older checkpoints could not be deleted, if so.

        Args:
            is_wanted: returns False when the wait for other ranks is in vain.
            tell: called with the same, and the seconds that it took, before anything is read back.

        Raises:
            CorruptStateError: if the region does not match its index, another one is in its place, its
                numbers are not finite, or storage has something else than was written.
            LockLostError: if the persist directory is another job's by now.
            OSError: if storage fails, or the other ranks do not get there before the deadline.
        """
        deadline_s = time.monotonic() + request.deadline_s
        begun = self._ahead.pop(request.rank, None)
        ahead = _Ahead() if begun is None else begun.result()
        start_s = time.perf_counter() - ahead.seconds
        self._check_lock()
        _, index = _index_of(request)
        data_path = rank_path(index.iteration, index.rank, request.tag, "safetensors")
        warning = ""
        if request.writes_manifest:  # one rank for all: it reads every manifest
            if (deleting := self._running.get(confirmed_path(self._directory))) is not None:
                deleting[1].result()
            self._retention.remove_incomplete(index.iteration)
            warning = self._warning
        written = self._written(_index_path(data_path), index)
        if written is None:
            written = self._write_files(request, index, data_path, ahead)
        if request.writes_manifest:
            self._complete(index, request.tag, deadline_s, is_wanted)
        tell(written, time.perf_counter() - start_s, warning)
        self._read_back(written, data_path)
        return written, warning

    def _write_files(
        self, request: PersistRequest, index: Index, data_path: str, ahead: _Ahead
    ) -> Index:
        """Write data, if they are not there already, and index of a rank; return the index."""
        previous = read_previous(self._storage, request.previous)
        stored = assemble(index, request.rotating, previous, data_path.rpartition("/")[2])
        content, index_path = encode(stored.index), _index_path(data_path)
        try:
            if ahead.content != content:
                self._write(index, stored, Path(request.data), data_path)
            self._storage.write_atomically(index_path, content)
        except Exception:
            with suppress(Exception):  # a full disk must not stay full of what failed
                if not self._storage.exists(index_path):
                    self._storage.remove(data_path)
            raise
        return stored.index

    def _delete_older(self, _: Path, confirmed: bytes) -> None:
        """Delete what is too old since all ranks have read a checkpoint back, named by an index in it."""
        self._warning = ""
        try:
            self._retention.retain(find_checkpoint(self._storage, confirmed.decode()))
        except Exception as error:  # as any file system likes
            what = "old checkpoints cannot be removed"
            self._warning = f"{what}: {type(error).__name__}: {error}"

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

        def check() -> None:
            check_units(index, contents, str(data), written)
            for name, unit in written:
                content = contents[unit.file][unit.offset : unit.offset + unit.num_bytes]
                check_is_finite(name, unit, content)

        # No index names them before both are done.
        with ThreadPoolExecutor(1, "moe_ft-check") as checker:
            checked = checker.submit(check)
            pieces = stored.pieces(index, contents)
            self._storage.write(data_path, pieces, stored.index.file_bytes)
            try:
                checked.result()
            except CorruptStateError as error:
                with suppress(OSError):  # as what never became a checkpoint, later
                    self._storage.remove(data_path)
                # As a checkpoint it would take the place of those from which training can continue.
                raise CorruptStateError(
                    f"iteration {index.iteration} is not written to storage: {error}"
                ) from error

    def _read_back(self, index: Index, data_path: str) -> None:
        """Read what was written, for which older checkpoints are deleted; take it back if it is not that.

        Units in the files of older checkpoints were read when those were written.
        """
        try:
            check_data(self._storage, index, data_path, with_older=False)
        except (CorruptStateError, FileNotFoundError) as error:
            # First the index: without it no manifest is that of a checkpoint.
            for path in (_index_path(data_path), data_path):
                self._storage.remove(path)
            raise CorruptStateError(
                f"iteration {index.iteration} is not on storage as it was written: it is no checkpoint, and "
                f"older ones stay: {error}"
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
    ) -> None:
        """Wait until every rank's index is there, and write the manifest."""
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
        write_manifest(self._storage, index.iteration, tag, world_size)


def _index_path(data_path: str) -> str:
    return f"{data_path.removesuffix('safetensors')}json"


def _state_of(index: str) -> tuple[int, int]:
    """Return what changes when the index of a region is removed or replaced."""
    status = Path(index).stat()
    return status.st_ino, status.st_mtime_ns


def _index_of(request: PersistRequest) -> tuple[tuple[int, int], Index]:
    """Return the index of a region that is to be written, and what tells it from a later one."""
    found = _state_of(request.index)
    index = decode(Path(request.index).read_bytes(), Index, request.index)
    # Versions that only peers have are not written; their slots may be filled again meanwhile.
    index = msgspec.structs.replace(index, retained=msgspec.UNSET)
    if (index.rank, index.iteration) != (request.rank, request.iteration):
        raise CorruptStateError(f"{request.index} holds iteration {index.iteration}")
    if not index.is_whole:
        raise CorruptStateError(f"{request.index} holds only a part of a window")
    return found, index


def _read_settings() -> WriterSettings:
    """Return what the parent says; end with the parent, also if this process is stopped then."""
    die_with_parent()
    line = sys.stdin.buffer.readline()
    settings = SETTINGS.decode(line) if line else None
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
    ignore_signals()
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
