"""Destination of a conversion: nobody finds a checkpoint there until it is complete; it can be continued.

A journal, conversion.json, says what is to be written, and which shards are written and verified; with it the
same command continues after an interruption. Only one process writes there.

A folder of this machine is DST.incomplete until the end, unless the machine was started again in between:
until then nothing needs to be on the disk. After an error it is removed. The lock is that of a file,
DST.incomplete.lock.

Object stores have no rename, so files go where they stay: each when it is complete and verified on this
machine, and each is read back. The file that readers look for is the last one. The lock is that of
engine/persist/storage_lock.py.
"""

import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import starmap
from pathlib import Path
from typing import Any, override

from moe_ft.convert.verifying import FilePart, verify_parts
from moe_ft.engine.persist.storage_lock import (
    LOCK_NAME,
    LOCK_STALE_S,
    StorageLock,
    own_origin,
    watch_lock,
)
from moe_ft.errors import ConfigError, CorruptStateError, LockLostError, MoeFtError
from moe_ft.files.local_files import sync_file
from moe_ft.files.private_files import make_private, open_directory
from moe_ft.files.progress import PATIENCE_S
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum
from moe_ft.launches import launch_of
from moe_ft.processes import boot_id

_JOURNAL = "conversion.json"
_SPARE_BYTES = 16 << 20  # for headers and indexes
_PIECE_BYTES = 16 << 20
# Files without which nobody takes the others for a checkpoint, in the order of their uploads.
_LAST = (
    ".metadata",
    "model.safetensors.index.json",
    "config.json",
    "latest_checkpointed_iteration.txt",
)


class Destination:
    """A place that a conversion writes, and its journal. Used by one thread.

    Attributes:
        place: the folder or URL, for messages.
        work: folder of this machine to write to, inside of `writing`.
        left: a sentence on what an error of the disk or the store leaves.
    """

    left: str
    _place_of_journal: str

    def __init__(self, place: str, plan: str, description: str) -> None:
        """Name it; nothing is created before `writing`.

        Args:
            plan: checksum of everything that decides what is written.
            description: of the conversion, for people.
        """
        self.place = place
        self.work = Path()
        self._plan = plan
        self._description = description
        self._shards: dict[str, Any] = {}

    def check(self, num_bytes: int) -> None:
        """Raise ConfigError for a destination that is not empty, or if there is no room for all the bytes."""
        raise NotImplementedError

    def writing(self) -> AbstractContextManager[None]:
        """Create the place, or continue there, until what is written is published.

        Raises:
            ConfigError: if another conversion writes there, or has just ended.
        """
        raise NotImplementedError

    def written(self, shard: str) -> Any:
        """Return what was noted of a shard, None if it is still to be written."""
        return self._shards.get(shard)

    def note(self, shard: str, facts: Mapping[str, Any]) -> None:
        """Note that a shard is written and verified.

        Args:
            facts: that the end of the conversion needs, with the name of the file.
        """
        self._shards[shard] = facts
        self._write_journal()

    def _journal(self, **own: Any) -> bytes:
        journal = {"description": self._description, "plan": self._plan, **own}
        return json.dumps({**journal, "shards": self._shards}).encode()

    def _write_journal(self) -> None:
        raise NotImplementedError

    def _read_journal(self, content: bytes | None) -> dict[str, Any]:
        """Return the journal in the content of its file, None if that cannot be read."""
        try:
            journal: dict[str, Any] = json.loads(content or b"")
            plan, description = journal["plan"], journal["description"]
            journal["shards"] = dict(journal["shards"])
        except (ValueError, KeyError, TypeError):
            plan, description = "", "something else"
        if plan != self._plan:
            raise ConfigError(
                f"{self._place_of_journal} must hold the beginning of this conversion, but holds that of "
                f"{description}. Remove it, or name another DST."
            )
        return journal


class LocalDestination(Destination):
    """A folder, which appears when it is complete."""

    left = "Nothing is left of it: make both readable and DST writable, and try again."

    def __init__(self, path: str, plan: str, description: str) -> None:
        super().__init__(str(Path(path)), plan, description)
        self.path = Path(path)
        self.work = self.path.with_name(f"{self.path.name}.incomplete")
        self._place_of_journal = str(self.work)

    @override
    def check(self, num_bytes: int) -> None:
        self._check_is_free()
        parent = next(each for each in self.path.absolute().parents if each.exists())
        if not parent.is_dir():
            raise ConfigError(f"DST={self.path} cannot be made: {parent} is a file. Name another.")
        self._continue()
        there = sum(each.stat().st_size for each in self.work.rglob("*") if each.is_file())
        free = shutil.disk_usage(parent).free
        if (needed := num_bytes + _SPARE_BYTES - there) > free:
            raise ConfigError(
                f"DST={self.path} needs {needed} bytes, but {parent} has only {free} free. Make room, or "
                "give --what weights or a shorter --dtype."
            )

    def _check_is_free(self) -> None:
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"DST={self.path} must be a new or an empty folder, but it is not empty. Name another one, "
                "or remove it."
            )

    def _continue(self) -> None:
        """Take over the shards of a conversion that was interrupted.

        Raises UnsafePathError if the folder is another user's, or others can change what is in it.
        """
        if self.work.exists():
            content = None
            with open_directory(self.work), suppress(OSError):
                content = (self.work / _JOURNAL).read_bytes()
            journal = self._read_journal(content)
            self._shards = journal["shards"] if journal.get("boot") == boot_id() else {}

    @override
    @contextmanager
    def writing(self) -> Iterator[None]:
        self.work.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.work.with_name(f"{self.work.name}.lock"), self.path):
            self._check_is_free()  # again: another one may have ended since
            self._continue()
            make_private(self.work)
            self._shards = {key: each for key, each in self._shards.items() if self._is_sound(each)}
            self._write_journal()
            try:
                yield
            except Exception:  # not an interruption
                shutil.rmtree(self.work, ignore_errors=True)
                raise
            self._publish()

    def _is_sound(self, noted: Mapping[str, Any]) -> bool:
        """Return whether the file of a shard is still what was written."""
        try:
            (path,) = self.work.rglob(noted["file"])
            verify_parts(path, starmap(FilePart, noted["parts"]))
        except (OSError, KeyError, TypeError, ValueError):
            return False
        return True

    @override
    def _write_journal(self) -> None:
        temporary = self.work / f"{_JOURNAL}.new"
        temporary.write_bytes(self._journal(boot=boot_id()))
        os.replace(temporary, self.work / _JOURNAL)

    def _publish(self) -> None:
        for path in (*self.work.rglob("*"), self.work):
            sync_file(str(path))
        (self.work / _JOURNAL).unlink()
        os.umask(mask := os.umask(0))
        self.work.chmod(0o777 & ~mask)  # it was private
        if self.path.exists():
            self.path.rmdir()
        self.work.rename(self.path)
        sync_file(str(self.path.parent))


@contextmanager
def _locked(path: Path, destination: Path) -> Iterator[None]:
    """Hold the lock of a file, which is there only meanwhile."""
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


class RemoteDestination(Destination):
    """A prefix of an object store."""

    left = "What is there is no checkpoint yet: the same command continues it."

    def __init__(self, url: str, plan: str, description: str, shard_bytes: int) -> None:
        """Open the store; nothing is created before the with statement.

        Args:
            shard_bytes: most bytes of a file, unless one tensor has more.
        """
        super().__init__(url.rstrip("/"), plan, description)
        self._place_of_journal = f"DST={self.place}"
        parent, _, self._name = url.rstrip("/").rpartition("/")
        if parent.endswith(("/", ":")) or not self._name:
            raise ConfigError(
                f"DST={self.place} must be a new place in a bucket, but names none. Add a name to it."
            )
        try:
            self._storage = Storage(parent, PATIENCE_S).open()
            self._lock = StorageLock(Storage(url.rstrip("/"), PATIENCE_S))
        except ConfigError:  # the URL holds a secret, which is not to be shown
            raise
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"DST={self.place} cannot be used: {type(error).__name__}: {error}. Name a folder, or an "
                "fsspec URL whose package is installed."
            ) from error
        self._shard_bytes = shard_bytes
        name = f"moe_ft_convert_{os.getuid()}_{checksum(url.encode())}"
        self._folder = Path(tempfile.gettempdir()) / name

    @override
    def check(self, num_bytes: int) -> None:
        self._continue()
        folder = tempfile.gettempdir()
        needed = min(num_bytes, 2 * self._shard_bytes) + _SPARE_BYTES
        if (free := shutil.disk_usage(folder).free) < needed:
            raise ConfigError(
                f"{folder} has {free} bytes free, and files on their way to DST={self.place} need {needed} "
                "there. Make room, set TMPDIR to another folder, or give a smaller --shard-size."
            )

    def _continue(self) -> None:
        """Take over the shards of a conversion that was interrupted; refuse a place with something else."""
        self._shards = {}
        try:
            content = self._storage.read(self._at(_JOURNAL))
        except (FileNotFoundError, NotADirectoryError):
            if set(self._storage.names_in(self._name)) - {LOCK_NAME}:
                raise ConfigError(
                    f"DST={self.place} must be new, but something is there. Name another one, or remove it."
                ) from None
            return
        shards = self._read_journal(content)["shards"]
        self._shards = {key: each for key, each in shards.items() if self._has(each)}

    def _has(self, noted: Mapping[str, Any]) -> bool:
        """Return whether the file of a shard is still what was uploaded and read back, not written again."""
        try:
            return self._storage.version(self._at(noted["path"])) == noted.get("version")
        except FileNotFoundError:
            return False

    def _at(self, path: str) -> str:
        return f"{self._name}/{path}"

    @override
    @contextmanager
    def writing(self) -> Iterator[None]:
        self._take_lock()
        try:
            self._continue()  # again: another one may have ended since
            self._write_journal()
            with self._folder_for_files():
                try:
                    yield
                except LockLostError:
                    raise
                except MoeFtError:  # the source is at fault
                    with suppress(OSError):
                        self._remove()
                    raise
                self._publish()
        finally:
            with suppress(OSError):
                self._lock.release()

    @contextmanager
    def _folder_for_files(self) -> Iterator[None]:
        """Make the folder for files on their way; UnsafePathError if somebody else has it."""
        make_private(self._folder)
        shutil.rmtree(self._folder)  # of a conversion to this place that was killed
        make_private(self._folder)
        self.work = self._folder
        try:
            yield
        finally:
            shutil.rmtree(self.work, ignore_errors=True)

    def _take_lock(self) -> None:
        seen, own = self._lock.look(), own_origin(launch_of(os.environ))
        if seen is not None and not seen.is_over(own):
            line = (
                f"DST={self.place} belongs to another conversion: watching for {LOCK_STALE_S:.0f} s"
            )
            print(f"{line} whether it is alive", file=sys.stderr)
            now = watch_lock(self._lock, seen, LOCK_STALE_S)
            if now is not None and now != seen:
                raise ConfigError(
                    f"DST={self.place} is being written by {now.holder}. Wait for its end, or name another "
                    "one."
                )
            seen = now
        if not self._lock.take("convert", seen, own):
            raise ConfigError(
                f"DST={self.place} must be new, but another conversion has just begun there. Name another "
                "one, or wait for its end."
            )
        self._lock.start(lambda line: print(f"warning: {line}", file=sys.stderr))

    def _publish(self) -> None:
        self._check_lock()
        files = (each for each in self.work.rglob("*") if each.is_file())
        order = {name: number for number, name in enumerate(_LAST)}
        for path in sorted(files, key=lambda each: order.get(each.name, -1)):
            self._upload(path)
        self._storage.remove(self._at(_JOURNAL))

    def _remove(self) -> None:
        for noted in self._shards.values():
            self._storage.remove(self._at(noted["path"]))
        self._storage.remove(self._at(_JOURNAL))

    def _check_lock(self) -> None:
        try:
            self._lock.check()
        except LockLostError as error:
            raise LockLostError(
                f"DST={self.place}: another conversion has taken over, as this one did not answer for a "
                "while. This one ends, and leaves everything to the other."
            ) from error

    def _upload(self, path: Path) -> dict[str, Any]:
        """Upload a file and compare it with what is read back; return its path and version."""
        relative = path.relative_to(self.work).as_posix()
        where = self._at(relative)
        with path.open("rb") as file:
            if path.name in _LAST[1:]:
                self._storage.write_atomically(where, file.read())
            else:
                self._storage.write(where, map(memoryview, _pieces(file)))
            file.seek(0)
            num_bytes = 0
            for piece in _pieces(file):
                if self._storage.read(where, num_bytes, len(piece)) != piece:
                    raise CorruptStateError(
                        f"{self.place}/{relative} is not what was uploaded. Is the store sound?"
                    )
                num_bytes += len(piece)
        if self._storage.size(where) != num_bytes:
            raise CorruptStateError(
                f"{self.place}/{relative} differs in size from what was uploaded"
            )
        return {"path": relative, "version": self._storage.version(where)}

    @override
    def written(self, shard: str) -> Any:
        noted = self._shards.get(shard)
        return None if noted is None else noted["facts"]

    @override
    def note(self, shard: str, facts: Mapping[str, Any]) -> None:
        self._check_lock()
        (path,) = self.work.rglob(facts["file"])
        super().note(shard, {**self._upload(path), "facts": facts})
        path.unlink()

    @override
    def _write_journal(self) -> None:
        self._storage.write_atomically(self._at(_JOURNAL), self._journal())


def _pieces(file: Any) -> Iterator[bytes]:
    return iter(lambda: file.read(_PIECE_BYTES), b"")
