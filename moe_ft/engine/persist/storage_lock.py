"""The lock of a persist directory: the start of a job that writes there.

A start takes the lock, renews it from rank 0 and from the writer of rank 0, and looks at it before everything
that could harm another job. A lock is stale if it does not change while somebody watches it for LOCK_STALE_S
of their own monotonic clock: the time in it is for people, and no clock is compared with another one.

On a file system exactly one of several starts gets the lock. On an object store the same holds where the
fsspec back end has a conditional put, for a lock that is not there; else the last one to write has it, which
all find out by reading it back after a moment, and again before every manifest and every deletion.

A start that is over has left its lock, if it was killed: its `Origin` may tell. Where nothing does, only a
lock that nobody renews tells it. Whether the lock of another start may be taken is decided in
recovery/persist_directory.py.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from moe_ft.calls import looks_again
from moe_ft.errors import LockLostError
from moe_ft.files.storage import Storage
from moe_ft.launches import Launch
from moe_ft.processes import has_ended, process_namespace, start_ticks

LOCK_NAME = "moe_ft.lock"
LOCK_STALE_S = 30.0  # three renewals
LOCK_RENEWAL_S = 10.0
_AGAIN_S = 1.0  # after a renewal that failed: three that are missed cost the lock
_SETTLE_S = 2.0  # in which those who write to an object store at the same time have written
_GAP_S = 1.0
_END_S = 2.0
_RELEASE_ATTEMPTS = 3
_ROOM_BYTES = 20  # for the digits of a growing heartbeat
_LOOK_POLL_S = 0.5
_LONGEST_LOOK_S = 2.0

_MAX_AGENTS = 64  # that a lock names: a restart without any of these watches the lock


class Origin(msgspec.Struct, frozen=True):
    """Processes of a start, and its launcher.

    Attributes:
        system: boot and process numbers that its processes belong to; empty if that cannot be known.
        processes: numbers and start times of rank 0 and, under torchrun, of the process that started it: as
            long as that lives, another rank 0 may come.
        agents: names of torchrun's agents, of the first nodes. An agent serves one job, and ends what it has
            started before it starts anything again.
        scheduled: job of SLURM; empty without it.
        counts: how often SLURM has started that job before, and without torchrun, how often its script has
            started the ranks before.
    """

    system: str = ""
    processes: tuple[tuple[int, int], ...] = ()
    agents: tuple[str, ...] = ()
    scheduled: str = ""
    counts: tuple[int, int] = (0, 0)

    def is_over(self, own: "Origin") -> bool:
        """Return whether it is known that nothing of this start runs any more."""
        if set(self.agents) & set(own.agents):
            return True
        if self.scheduled and self.scheduled == own.scheduled and self.counts < own.counts:
            return True
        is_here = self.system and self.system == own.system
        return bool(is_here and self.processes) and all(has_ended(*each) for each in self.processes)


def own_origin(launch: Launch, agents: Iterable[str] = ()) -> Origin:
    """Return the origin of this process, which a launch has made.

    Args:
        agents: of all nodes.
    """
    pids = [os.getpid(), os.getppid()] if launch.agent else [os.getpid()]
    return Origin(
        system=process_namespace(),
        processes=tuple((pid, start_ticks(pid)) for pid in pids),
        agents=tuple(dict.fromkeys(filter(None, agents)))[:_MAX_AGENTS],
        scheduled=launch.job,
        counts=(launch.requeues, launch.scripted),
    )


class Lock(msgspec.Struct, frozen=True):
    """The content of a lock; it may also have fields that only later versions know.

    Attributes:
        owner: random, of one start; empty in locks of earlier versions.
        heartbeat: number of renewals. It is the last field, so that a renewal changes its digits only.
    """

    job_id: str
    host: str
    owner: str = ""
    started: str = ""
    origin: Origin = Origin()
    heartbeat: int = 0


_LOCK = msgspec.json.Decoder(Lock)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenLock:
    """Content of the lock's place, as somebody found it; no lock if it is none, as after a loss of power."""

    content: bytes
    lock: Lock | None

    @property
    def holder(self) -> str:
        """The start that has it, for people."""
        if self.lock is None:
            return "an unknown job (its content is not a lock's)"
        since = f", since {self.lock.started}" if self.lock.started else ""
        return f"job '{self.lock.job_id}' on {self.lock.host}{since}"

    def is_over(self, own: Origin) -> bool:
        """Return whether the start that has it is known to be over; see `Origin`."""
        return self.lock is not None and self.lock.origin.is_over(own)


class StorageLock:
    """The lock as one start has it, or wants it. Any thread may use it."""

    def __init__(self, storage: Storage, owner: str = "") -> None:
        """Take the owner of the lock; one that is about to take it gets a new one."""
        self.owner = owner or secrets.token_hex(16)
        self._storage = storage
        path = storage.local_path(LOCK_NAME)
        self._file = _StoredLock(storage) if path is None else _LocalLock(storage, path)
        self._should_end = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_taken = False  # until this start is known to have had it

    def look(self) -> SeenLock | None:
        """Return what is in the lock's place, None only if nothing is; raises OSError if that is unknown."""
        try:
            content = self._storage.read(LOCK_NAME)
        except FileNotFoundError:
            return None
        return SeenLock(content=content, lock=_decode(content))

    def take(self, job_id: str, seen: SeenLock | None, origin: Origin | None = None) -> bool:
        """Take the lock; return whether this start has it now, False if another one was quicker.

        Args:
            seen: what is to be replaced, None if nothing was there.
        """
        lock = Lock(
            job_id=job_id,
            host=socket.gethostname(),
            owner=self.owner,
            started=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            origin=origin or Origin(),
        )
        content = msgspec.json.encode(lock) + b" " * _ROOM_BYTES
        # Another one was quicker, or the answer to a first try was lost: the content decides.
        with suppress(FileExistsError):
            if seen is None:
                self._file.create(content)
            else:
                self._file.replace(seen.content, content)
        self.is_taken = self.is_own(self.look())
        return self.is_taken

    def is_own(self, seen: SeenLock | None) -> bool:
        """Return whether this start has written what was seen."""
        return seen is not None and seen.lock is not None and seen.lock.owner == self.owner

    def check(self) -> None:
        """Raise LockLostError unless this start still has the lock; then it never will again."""
        try:
            content = self._storage.read(LOCK_NAME)
        except FileNotFoundError:
            time.sleep(_GAP_S)  # another start may have held it in its hands: see _LocalLock.remove
            try:
                content = self._storage.read(LOCK_NAME)
            except FileNotFoundError:
                raise LockLostError(self._missing()) from None
        _advanced(content, self.owner, self._storage.url)
        self.is_taken = True

    def _missing(self) -> str:
        where = f"{LOCK_NAME} in {self._storage.url}"
        if not self.is_taken:
            return f"{where} is not taken yet, or it was removed: nothing may be written there"
        return (
            f"{where} is gone: another job had taken it over and has ended, or it was removed. This "
            "job writes no more checkpoints there. Start it again."
        )

    def renew(self) -> None:
        """Show those who watch that this start is alive; raises as `check` does."""
        self.check()
        self._file.renew(self.owner)

    def start(self, report: Callable[[str], None]) -> None:
        """Renew the lock until `close`, on a thread that reports what goes wrong."""
        self._thread = threading.Thread(
            target=self._keep, args=(report,), name="moe_ft-lock", daemon=True
        )
        self._thread.start()

    def _keep(self, report: Callable[[str], None]) -> None:
        # Nobody waits for this thread, so it may wait for storage; else it would leave a thread every time.
        lock = StorageLock(self._storage.with_patience(None), self.owner)
        is_failing = False
        while not self._should_end.wait(_AGAIN_S if is_failing else LOCK_RENEWAL_S):
            try:
                lock.renew()
                is_failing = False
            except LockLostError as error:
                if self.is_taken or lock.is_taken:  # else the start still waits for it
                    report(str(error))
                    return
            except Exception as error:  # fsspec raises whatever its back ends do
                if not is_failing:
                    report(f"{LOCK_NAME} in {self._storage.url} cannot be renewed for now: {error}")
                is_failing = True

    def close(self) -> None:
        """End the renewals."""
        self._should_end.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def release(self) -> None:
        """End the renewals and remove the lock if it is this start's; raises OSError if storage fails."""
        self.close()
        for _ in range(_RELEASE_ATTEMPTS):  # a last renewal may come in between
            seen = self.look()
            if seen is None or not self.is_own(seen):
                return
            if self._file.remove(seen.content):
                return


def find_live(lock: StorageLock, watch_s: float, own: Origin | None = None) -> str | None:
    """Return who renews a lock while it is watched; None if it is free, nobody does, or it is given up.

    Args:
        own: origin of this process, by which an earlier start may be known to be over.
    """
    seen = lock.look()
    if seen is None or (own is not None and seen.is_over(own)):
        return None
    now = watch_lock(lock, seen, watch_s)
    return None if now is None or now == seen else now.holder


def watch_lock(lock: StorageLock, seen: SeenLock, watch_s: float) -> SeenLock | None:
    """Watch a lock until it changes; return what is in its place then, `seen` itself if it never did.

    A job that is alive renews its lock every LOCK_RENEWAL_S. Raises OSError if it cannot be read.
    """
    watched_s, looked_s = 0.0, time.monotonic()
    while watched_s < watch_s:
        time.sleep(_LOOK_POLL_S)
        now = lock.look()
        # While storage hangs for us, the other job cannot renew its lock either: that time does not count.
        before_s, looked_s = looked_s, time.monotonic()
        watched_s += min(looked_s - before_s, _LONGEST_LOOK_S)
        if now != seen:
            return now
    return seen


class _LocalLock:
    """A lock on a file system that has atomic links and renames."""

    def __init__(self, storage: Storage, path: Path) -> None:
        self._storage = storage
        self._path = path

    def create(self, content: bytes) -> None:
        """Write it; raise FileExistsError if there is one. Nobody ever sees a part of it."""
        self._storage.aside(f"create {LOCK_NAME}", _create, str(self._path), content)

    def replace(self, before: bytes, content: bytes) -> None:
        """Put another in the place of exactly what was seen, which only one of several can."""
        if self.remove(before):
            self.create(content)

    def renew(self, owner: str) -> None:
        """Write what follows from what is there."""
        act, url = f"renew {LOCK_NAME}", self._storage.url
        self._storage.aside(act, _renew, str(self._path), owner, url)

    def remove(self, before: bytes) -> bool:
        """Remove exactly what was seen; return whether it was there."""
        return self._storage.aside(f"remove {LOCK_NAME}", _remove, str(self._path), before)


def _create(path: str, content: bytes) -> None:
    temporary = _temporary(path)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a loss of power leaves a lock of nobody
        _give_name(temporary, Path(path))
    finally:
        temporary.unlink(missing_ok=True)


def _renew(path: str, owner: str, url: str) -> None:
    # Into the file that was read: if another start puts its own in place now, that is not harmed.
    with Path(path).open("r+b") as file:
        content = _advanced(file.read(), owner, url)
        file.seek(0)
        file.write(content)


def _remove(path: str, before: bytes) -> bool:
    taken = _temporary(path)
    try:
        Path(path).rename(taken)
    except FileNotFoundError:
        return False
    found = None
    try:
        found = taken.read_bytes()
    finally:  # also if nobody can tell whose it is
        if found != before:
            with suppress(FileExistsError):  # whose it was notices that another has it
                _give_name(taken, Path(path))
        taken.unlink()
    return found == before


def _give_name(file: Path, path: Path) -> None:
    try:
        looks_again()(os.link)(file, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with path.open("xb") as target:
            target.write(file.read_bytes())


def _temporary(path: str) -> Path:
    return Path(path).with_name(f".{LOCK_NAME}.{secrets.token_hex(8)}")


class _StoredLock:
    """A lock in an object store: of several that write, the last one has it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def create(self, content: bytes) -> None:
        self._storage.create(LOCK_NAME, content)
        time.sleep(_SETTLE_S)

    def replace(self, before: bytes, content: bytes) -> None:
        self._storage.write_atomically(LOCK_NAME, content)
        time.sleep(_SETTLE_S)

    def renew(self, owner: str) -> None:
        content = _advanced(self._storage.read(LOCK_NAME), owner, self._storage.url)
        self._storage.write_atomically(LOCK_NAME, content)

    def remove(self, before: bytes) -> bool:
        self._storage.remove(LOCK_NAME)
        return True


def _decode(content: bytes) -> Lock | None:
    try:
        return _LOCK.decode(content)
    except (ValueError, RecursionError):
        return None


def _advanced(content: bytes, owner: str, url: str) -> bytes:
    """Return the next content of a start's lock, which is as long; raise LockLostError if it is another's."""
    seen = SeenLock(content=content, lock=_decode(content))
    lock = seen.lock
    if lock is None or lock.owner != owner:
        raise LockLostError(
            f"{LOCK_NAME} in {url} belongs to {seen.holder} now: this job writes no more checkpoints there. "
            "End one of the two, or give it another --moe-ft-persist-dir."
        )
    following = msgspec.structs.replace(lock, heartbeat=lock.heartbeat + 1)
    return msgspec.json.encode(following).ljust(len(content))
