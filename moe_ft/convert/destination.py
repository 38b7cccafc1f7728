"""Destination of a conversion: a folder that appears when it is complete, and can be continued until then.

Everything is written to a folder next to it, DST.incomplete, with a journal of the shards that are written
and verified. After an interruption the same command continues there, unless the machine was started again in
between: until the end nothing needs to be on the disk. After an error it is removed. Only one process writes
there: it holds a lock on the file DST.incomplete.lock. remote_destination.py is the same for URLs.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moe_ft.convert.remote_path import AnyPath, RemotePath
from moe_ft.errors import ConfigError
from moe_ft.files.storage import sync_file
from moe_ft.format.encoding import checksum
from moe_ft.processes import boot_id

JOURNAL = "conversion.json"
SPARE_BYTES = 16 << 20  # for headers and indexes


def signature_of(paths: Iterable[AnyPath]) -> str:
    """Return a checksum of the names, sizes and times of files: another one if they were written again."""
    facts = [(path.name, *_version_of(path)) for path in sorted(paths, key=str)]
    return checksum(repr(facts).encode())


def _version_of(path: AnyPath) -> tuple[object, ...]:
    if isinstance(path, RemotePath):
        return (path.version(),)
    return (path.stat().st_size, path.stat().st_mtime_ns)


class Destination:
    """A folder that a conversion writes. Used by one thread.

    Attributes:
        path: the folder.
        work: where it is until it is complete.
        left: a sentence on what an error leaves.
    """

    left = "Nothing is left of it: make both readable and DST writable, and try again."

    def __init__(self, path: str, plan: str, description: str) -> None:
        """Name it; nothing is created before the with statement.

        Args:
            path: of the folder.
            plan: checksum of everything that decides what is written.
            description: of the conversion, for people.
        """
        self.path = Path(path)
        self.work = self.path.with_name(f"{self.path.name}.incomplete")
        self._plan, self._description = plan, description
        self._shards: dict[str, Any] = {}
        self._held = ExitStack()

    def check(self, num_bytes: int) -> None:
        """Refuse a destination that is not empty, or has too little space.

        Args:
            num_bytes: of all that will be written.

        Raises:
            ConfigError: if it cannot be written.
        """
        self._check_is_free()
        parent = next(each for each in self.path.absolute().parents if each.exists())
        if not parent.is_dir():
            raise ConfigError(f"DST={self.path} cannot be made: {parent} is a file. Name another.")
        self._read_journal()
        there = sum(each.stat().st_size for each in self.work.rglob("*") if each.is_file())
        free = shutil.disk_usage(parent).free
        if (needed := num_bytes + SPARE_BYTES - there) > free:
            raise ConfigError(
                f"DST={self.path} needs {needed} bytes, and {parent} has {free} free. Make room, or give "
                "--what weights or a shorter --dtype."
            )

    def _check_is_free(self) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"DST={self.path} must be a new or an empty folder, and is not empty. Name another one, or "
                "remove it."
            )

    def _read_journal(self) -> None:
        if not self.work.exists():
            return
        try:
            journal = json.loads((self.work / JOURNAL).read_text(encoding="utf-8"))
            plan, shards = journal["plan"], dict(journal["shards"])
            self._shards = shards if journal["boot"] == boot_id() else {}
            description = journal["description"]
        except (OSError, ValueError, KeyError, TypeError):
            plan, description = "", "something else"
        if plan != self._plan:
            raise ConfigError(
                f"{self.work} must hold the beginning of this conversion, and holds that of {description}. "
                "Remove it, or name another DST."
            )

    def __enter__(self) -> Self:
        """Create the folder to write to, or continue in it.

        Raises:
            ConfigError: if another conversion writes there, or has just ended.
        """
        self.work.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            opened.enter_context(_locked(self.work.with_name(f"{self.work.name}.lock"), self.path))
            self._check_is_free()  # again: another one may have ended since
            self._read_journal()
            self.work.mkdir(exist_ok=True)
            self._write_journal()
            self._held = opened.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Publish the folder; remove it after an error, but not after an interruption."""
        with self._held:
            if kind is None:
                self._publish()
            elif issubclass(kind, Exception):
                shutil.rmtree(self.work, ignore_errors=True)

    def _publish(self) -> None:
        for path in (*self.work.rglob("*"), self.work):
            sync_file(str(path))
        (self.work / JOURNAL).unlink()
        if self.path.exists():
            self.path.rmdir()
        self.work.rename(self.path)
        sync_file(str(self.path.parent))

    def written(self, shard: str) -> Any:
        """Return what was noted of a shard, None if it is still to be written."""
        return self._shards.get(shard)

    def note(self, shard: str, facts: Any) -> None:
        """Note that a shard is written and verified, with facts that the end of the conversion needs."""
        self._shards[shard] = facts
        self._write_journal()

    def _write_journal(self) -> None:
        journal = {
            "description": self._description,
            "plan": self._plan,
            "boot": boot_id(),
            "shards": self._shards,
        }
        temporary = self.work / f"{JOURNAL}.new"
        temporary.write_text(json.dumps(journal), encoding="utf-8")
        os.replace(temporary, self.work / JOURNAL)


@contextmanager
def _locked(path: Path, destination: Path) -> Iterator[None]:
    """Hold the lock of a file, which is there only meanwhile.

    Raises:
        ConfigError: if another process holds it, or the file system has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _lock(descriptor, destination)
            if _is_at(path, descriptor):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a file is still there: whoever held its lock before removes it at the end."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, destination: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"DST={destination} is being written by another process of moe_ft convert. Wait for its end, or "
            "name another one."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"DST={destination} must be on a file system with locks, without which two conversions could "
            f"write there at once: {error}. Mount it with them (Lustre: -o flock), or name another one."
        ) from error
