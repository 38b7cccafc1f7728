"""Persist directory at a start: checks that it can be used, and takes its lock or takes it over.

engine/persist/storage_lock.py has the lock itself, recovery/claim.py the other directories and memory.
"""

import os
import secrets
import time

from moe_ft.engine.persist.origin import Origin, own_origin
from moe_ft.engine.persist.patience import PATIENCE_S
from moe_ft.engine.persist.storage import Storage, hide_password
from moe_ft.engine.persist.storage_lock import (
    LOCK_NAME,
    LOCK_STALE_S,
    SeenLock,
    StorageLock,
    watch_lock,
)
from moe_ft.errors import ConfigError
from moe_ft.recovery.site import Site, say

_LOCK_POLL_S = 0.5
_LOCK_ATTEMPTS = 5


def open_storage(site: Site) -> tuple[Storage | None, StorageLock | None]:
    """Return the persist directory after a trial write, and its lock on rank 0; None without one.

    The lock of an earlier start that is over is left until `take_lock`: this start may still be refused.

    Raises:
        ConfigError: if it cannot be used, does not answer, or another running job uses it.
    """
    url = site.config.storage.persist_dir
    if url is None:
        return None, None
    try:
        storage = Storage(url, PATIENCE_S)
        if not site.config.storage.persists:
            return storage, None
        if site.is_lowest_on_node:
            storage.make_root()
            probe = f".probe_{site.rank:05d}_{secrets.token_hex(4)}"
            storage.write_atomically(probe, b"moe_ft")
            storage.remove(probe)
        if site.rank != 0:
            return storage, None
        origin, seen = origin_of(site), StorageLock(storage).look()
        is_ours = seen is not None and seen.is_over(origin)
        return storage, None if is_ours else take_lock(site.job_id, storage, origin)
    except ConfigError:
        raise
    except Exception as error:  # fsspec raises whatever its back ends raise
        raise ConfigError(
            f"--moe-ft-persist-dir={hide_password(url)} cannot be used on node {site.node}: "
            f"{type(error).__name__}: {error}. Name a directory that can be written and answers within "
            f"{PATIENCE_S:.0f} s, or an fsspec URL whose package is installed."
        ) from error


def release_lock(lock: StorageLock) -> None:
    """Give the persist directory up to other jobs; print a line if that fails. Rank 0 only."""
    try:
        lock.release()
    except Exception as error:  # fsspec raises whatever its back ends raise
        say(
            f"{LOCK_NAME} stays in the persist directory, where another job waits {LOCK_STALE_S:.0f} s for "
            f"it: {type(error).__name__}: {error}"
        )


def origin_of(site: Site) -> Origin:
    """Return the origin of this start. Rank 0 only."""
    return own_origin(os.environ, (info.agent for info in site.topology.ranks))


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
    lock, origin = StorageLock(storage), origin or own_origin(os.environ)
    for _ in range(_LOCK_ATTEMPTS):
        seen = lock.look()
        if seen is not None:
            seen = _wait_for_stale(storage, lock, seen, origin)
        if lock.take(job_id, seen, origin):
            lock.start(say)
            return lock
        time.sleep(_LOCK_POLL_S)
    raise ConfigError(
        f"--moe-ft-persist-dir={storage.url}: {LOCK_NAME} there could not be taken, since it changed each of "
        f"{_LOCK_ATTEMPTS} times: several jobs start in this directory, and only one may write to it. Give "
        "each another one."
    )


def _wait_for_stale(
    storage: Storage, lock: StorageLock, seen: SeenLock, origin: Origin
) -> SeenLock | None:
    """Return the lock that may be taken over, None if it has gone; watch one whose start may be alive."""
    if seen.is_over(origin):
        return seen
    say(
        f"{LOCK_NAME} in {storage.url} is that of {seen.holder}: watching for {LOCK_STALE_S:.0f} s whether "
        "that job is alive"
    )
    now = watch_lock(lock, seen, LOCK_STALE_S)
    if now is None:
        return None
    if now != seen:
        raise ConfigError(
            f"--moe-ft-persist-dir={storage.url} is used by {now.holder}, which has just renewed "
            f"{LOCK_NAME}: two jobs cannot write to one directory, nor can two starts of one job at the same "
            "time. Name another one, or wait until that job has ended."
        )
    say(f"taking over {storage.url} from {seen.holder}, which is no longer running")
    return seen
