"""Persist directory at a start: whether it can be used, and its lock, taken, taken over or awaited.

A start that does not need storage, or can read from it all that it needs, begins without a directory that
cannot be written to: as in training, that costs checkpoints and not the run. engine/persist/storage_lock.py
has the lock itself, recovery/job_memory.py the memory directory.
"""

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import override

from moe_ft.engine.persist.storage_lock import (
    LOCK_NAME,
    LOCK_STALE_S,
    Origin,
    SeenLock,
    StorageLock,
    own_origin,
    watch_lock,
)
from moe_ft.errors import ConfigError, StorageAwayError, UnmadeDirectoryError
from moe_ft.files.progress import PATIENCE_S
from moe_ft.files.storage import Storage
from moe_ft.launches import launch_of
from moe_ft.recovery.site import Site
from moe_ft.saying import say, warn

_LOCK_POLL_S = 0.5
_LOCK_ATTEMPTS = 5
_END_S = 2.0  # for a thread that may wait for storage
_RETRY_S = 10.0  # between tries to take the lock where storage does not answer
_OTHER_JOB_S = 600.0  # where another job has it
# Of a flag; storage that is full, hangs or is not reached raises others.
_OF_FLAGS = (
    *(FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError),
    UnmadeDirectoryError,
)
# Of making a directory: /proc, an image that is mounted to be read. Of writing into one, a read-only file
# system may be one whose disk had errors.
_NEVER_MADE = (errno.ENOENT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)
_OF_BACK_ENDS = (ValueError, ImportError, TypeError)  # an unknown scheme, a package that is missing


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Reason why a persist directory cannot be used now.

    Attributes:
        text: with the flag, the node, the rule and the remedy.
        is_of_flags: whether the flag is wrong, if nobody has used the directory before.
    """

    text: str
    is_of_flags: bool

    @property
    def refusal(self) -> ConfigError | StorageAwayError:
        """Exception for a start that cannot do without the directory."""
        return ConfigError(self.text) if self.is_of_flags else StorageAwayError(self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistDirectory:
    """The persist directory of a start.

    Attributes:
        storage: None without one.
        lock: None on all ranks but rank 0, and while an earlier start of this job may hold it.
        trouble: what this rank has met; None if the directory can be used.
    """

    storage: Storage | None = None
    lock: StorageLock | None = None
    trouble: Trouble | None = None


def open_storage(site: Site) -> PersistDirectory:
    """Return the persist directory after a trial write, and its lock on rank 0.

    The lock of an earlier start that is over is left until `take_lock`: this start may still be refused.

    Raises:
        ConfigError: if another running job uses it.
    """
    url = site.config.storage.persist_dir
    if url is None:
        return PersistDirectory()
    storage = Storage(url, PATIENCE_S, is_apart=True)
    try:
        if site.is_lowest_on_node:
            try_writing(storage)
        if site.rank != 0:
            return PersistDirectory(storage=storage)
        origin, seen = origin_of(site), StorageLock(storage).look()
        is_ours = seen is not None and seen.is_over(origin)
        return PersistDirectory(
            storage=storage, lock=None if is_ours else take_lock(site.job_id, storage, origin)
        )
    except ConfigError:
        raise
    except Exception as error:  # fsspec raises whatever its back ends raise
        return PersistDirectory(storage=storage, trouble=trouble_of(site, error))


def try_writing(storage: Storage) -> None:
    """Write a small file and remove it; raises whatever the back end does."""
    try:
        storage.make_root()
    except OSError as error:
        if error.errno in _NEVER_MADE:
            raise UnmadeDirectoryError(*error.args) from error
        raise
    probe = f".probe_{secrets.token_hex(8)}"
    storage.write_atomically(probe, b"moe_ft")
    storage.remove(probe)


def trouble_of(site: Site, error: Exception) -> Trouble:
    """Describe an error of the persist directory."""
    text = (
        f"--moe-ft-persist-dir={site.config.storage.persist_dir or ''} cannot be used on node "
        f"{site.node}: {type(error).__name__}: {error}. Name a directory that can be written and answers "
        f"within {PATIENCE_S:.0f} s, or an fsspec URL whose package is installed."
    )
    is_of_back_end = isinstance(error.__cause__, _OF_BACK_ENDS)
    return Trouble(
        text=text, is_of_flags=isinstance(error, (*_OF_FLAGS, *_OF_BACK_ENDS)) or is_of_back_end
    )


class LateLock(StorageLock):
    """A lock that a thread takes when storage answers again. Until then nothing may be written."""

    def __init__(self, storage: Storage, job_id: str, origin: Origin) -> None:
        super().__init__(storage)
        # Nobody waits for the thread: see `StorageLock._keep`.
        self._awaited = StorageLock(storage.with_patience(None), self.owner)
        self._patient = storage.with_patience(None)
        self._job_id = job_id
        self._origin = origin
        self._taking: threading.Thread | None = None

    @override
    def start(self, report: Callable[[str], None]) -> None:
        self._taking = threading.Thread(
            target=self._take, args=(report,), name="moe_ft-late-lock", daemon=True
        )
        self._taking.start()

    def _take(self, report: Callable[[str], None]) -> None:
        said, pause_s = "", _RETRY_S
        while not self._should_end.wait(pause_s):
            try:
                try_writing(
                    self._patient
                )  # a lock of this job can be renewed where nothing else has room
                acquire(
                    self._job_id,
                    self._patient,
                    self._awaited,
                    self._origin,
                    self._should_end.is_set,
                )
            except Exception as error:  # fsspec raises whatever its back ends raise
                if (reason := f"{type(error).__name__}: {error}") != said:
                    report(f"no checkpoints go to storage yet: {reason}")
                said = reason
                pause_s = _OTHER_JOB_S if isinstance(error, ConfigError) else _RETRY_S
            if self._awaited.is_taken:
                self.is_taken = True
                report(f"{self._patient.url} can be used again: checkpoints go there from now on")
                super().start(report)
                return

    @override
    def close(self) -> None:
        self._should_end.set()
        if self._taking is not None:
            self._taking.join(_END_S)  # before the thread that it starts
        super().close()

    @override
    def release(self) -> None:
        self.close()
        if self.is_taken:
            super().release()


def release_lock(lock: StorageLock) -> None:
    """Give the persist directory up to other jobs; print a line if that fails. Rank 0 only."""
    try:
        lock.release()
    except Exception as error:  # fsspec raises whatever its back ends raise
        warn(
            f"{LOCK_NAME} stays in the persist directory, where another job waits {LOCK_STALE_S:.0f} s for "
            f"it: {type(error).__name__}: {error}"
        )


def origin_of(site: Site) -> Origin:
    """Return the origin of this start. Rank 0 only."""
    return own_origin(site.launch, (info.agent for info in site.topology.ranks))


def take_lock(job_id: str, storage: Storage, origin: Origin | None = None) -> StorageLock:
    """Return the lock of the persist directory, taken and being renewed. Of a job, rank 0 only.

    The lock of a start that is known to be over is taken at once, any other when nobody renews it. A start
    that still runs notices and stops writing.

    Args:
        origin: of this start; by default that of this process.

    Raises:
        ConfigError: if another start has it and is alive, also one of the same job.
        OSError: if storage fails.
    """
    lock = StorageLock(storage)
    acquire(job_id, storage, lock, origin or own_origin(launch_of(os.environ)))
    lock.start(warn)
    return lock


def acquire(
    job_id: str,
    storage: Storage,
    lock: StorageLock,
    origin: Origin,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Take a lock of the persist directory, as `take_lock` does.

    Args:
        is_over: returns True when nobody wants the lock any more; it is then not taken.

    Raises:
        ConfigError: if another start has it and is alive.
        OSError: if storage fails.
    """
    for _ in range(_LOCK_ATTEMPTS):
        seen = lock.look()
        # Its own is there if storage took it, but could not be read then.
        if seen is not None and not lock.is_own(seen) and not seen.is_over(origin):
            say(
                f"{LOCK_NAME} in {storage.url} belongs to {seen.holder}: watching for {LOCK_STALE_S:.0f} s "
                "whether that job is alive"
            )
            seen = check_nobody_renews(storage, lock, seen, LOCK_STALE_S)
            if seen is not None:
                say(f"taking over {storage.url} from {seen.holder}, which is no longer running")
        if is_over() or lock.take(job_id, seen, origin):
            return
        time.sleep(_LOCK_POLL_S)
    raise ConfigError(
        f"--moe-ft-persist-dir={storage.url}: {LOCK_NAME} there could not be taken, since it changed each of "
        f"{_LOCK_ATTEMPTS} times: several jobs start in this directory, and only one may write to it. Give "
        "each another one."
    )


def check_nobody_renews(
    storage: Storage, lock: StorageLock, seen: SeenLock, watch_s: float
) -> SeenLock | None:
    """Watch a lock whose start may be alive; return it if nobody renews it, None if it has gone.

    Raises:
        ConfigError: if that start is alive.
        OSError: if storage fails.
    """
    now = watch_lock(lock, seen, watch_s)
    if now is not None and now != seen:
        raise ConfigError(
            f"--moe-ft-persist-dir={storage.url} is used by {now.holder}, which has just renewed "
            f"{LOCK_NAME}: two jobs cannot write to one directory, nor can two starts of one job at the same "
            "time. Name another one, or wait until that job has ended."
        )
    return now
