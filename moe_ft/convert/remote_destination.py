"""Destination of a conversion at an fsspec URL, such as a prefix of an object store.

Object stores have no rename, so files go where they stay: each when it is complete and verified on this
machine, and each is read back. conversion.json says there which are; with it the same command continues after
an interruption. Nobody finds a checkpoint before the end: the file that readers look for is the last one.
Only one process writes there: it has the lock of engine/persist/storage_lock.py. destination.py is the same
for folders of this machine.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moe_ft.convert.destination import JOURNAL, SPARE_BYTES
from moe_ft.engine.persist.origin import own_origin
from moe_ft.engine.persist.storage_lock import LOCK_NAME, LOCK_STALE_S, StorageLock, watch_lock
from moe_ft.errors import ConfigError, CorruptStateError, LockLostError, MoeFtError
from moe_ft.files.patience import PATIENCE_S
from moe_ft.files.private_files import make_private
from moe_ft.files.storage import Storage, hide_password
from moe_ft.format.encoding import checksum

_PIECE_BYTES = 16 << 20
# Files without which nobody takes the others for a checkpoint, in the order of their uploads.
_LAST = (
    ".metadata",
    "model.safetensors.index.json",
    "config.json",
    "latest_checkpointed_iteration.txt",
)


class RemoteDestination:
    """A prefix that a conversion writes. Used by one thread.

    Attributes:
        path: the URL, for messages.
        work: folder of this machine for files on their way, inside of the with statement.
        left: a sentence on what an error of the store leaves.
    """

    left = "What is there is no checkpoint yet: the same command continues it."

    def __init__(self, url: str, plan: str, description: str, shard_bytes: int) -> None:
        """Name it; nothing is created before the with statement.

        Args:
            url: of the prefix.
            plan: checksum of everything that decides what is written.
            description: of the conversion, for people.
            shard_bytes: most bytes of a file, unless one tensor has more.

        Raises:
            ConfigError: if nothing can be written to such a URL.
        """
        parent, _, self._name = url.rstrip("/").rpartition("/")
        self.path, self.work = hide_password(url.rstrip("/")), Path()
        if parent.endswith(("/", ":")) or not self._name:
            raise ConfigError(
                f"DST={self.path} must be a new place in a bucket, and names none. Add a name to it."
            )
        try:
            self._storage = Storage(parent, PATIENCE_S).open()
            self._lock = StorageLock(Storage(url.rstrip("/"), PATIENCE_S))
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"DST={self.path} cannot be used: {type(error).__name__}: {error}. Name a folder, or an "
                "fsspec URL whose package is installed."
            ) from error
        self._plan, self._description, self._shard_bytes = plan, description, shard_bytes
        self._shards: dict[str, Any] = {}
        self._is_begun = False
        name = f"moe_ft_convert_{os.getuid()}_{checksum(url.encode())}"
        self._folder = Path(tempfile.gettempdir()) / name

    def check(self, num_bytes: int) -> None:
        """Refuse a destination that is not empty, or a machine without room for the files on their way.

        Args:
            num_bytes: of all that will be written.

        Raises:
            ConfigError: if it cannot be written.
        """
        self._check_is_free()
        folder = tempfile.gettempdir()
        needed = min(num_bytes, 2 * self._shard_bytes) + SPARE_BYTES
        if (free := shutil.disk_usage(folder).free) < needed:
            raise ConfigError(
                f"{folder} has {free} bytes free, and files on their way to DST={self.path} need {needed} "
                "there. Make room, set TMPDIR to another folder, or give a smaller --shard-size."
            )

    def _check_is_free(self) -> None:
        """Read the journal; refuse a place that has none, but something else."""
        self._read_journal()
        if not self._is_begun and set(self._storage.names_in(self._name)) - {LOCK_NAME}:
            raise ConfigError(
                f"DST={self.path} must be new, and something is there. Name another one, or remove it."
            )

    def _read_journal(self) -> None:
        self._is_begun, self._shards = False, {}
        try:
            content = self._storage.read(self._at(JOURNAL))
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            journal = json.loads(content)
            plan, description = journal["plan"], journal["description"]
            shards: dict[str, Any] = dict(journal["shards"])
        except (ValueError, KeyError, TypeError):
            plan, description, shards = "", "something else", {}
        if plan != self._plan:
            raise ConfigError(
                f"DST={self.path} must hold the beginning of this conversion, and holds that of "
                f"{description}. Remove it, or name another DST."
            )
        self._shards = {key: each for key, each in shards.items() if self._has(each)}
        self._is_begun = True

    def _has(self, noted: Mapping[str, Any]) -> bool:
        """Return whether the file of a shard is still what was uploaded and read back, not written again."""
        try:
            return self._storage.version(self._at(noted["path"])) == noted.get("version")
        except FileNotFoundError:
            return False

    def _at(self, path: str) -> str:
        return f"{self._name}/{path}"

    def __enter__(self) -> Self:
        """Claim the place, or continue there.

        Raises:
            ConfigError: if another conversion writes there, or has just ended.
            UnsafePathError: if somebody else has the folder for files on their way.
        """
        self._take_lock()
        try:
            self._check_is_free()  # again: another one may have ended since
            self._storage.write_atomically(self._at(JOURNAL), self._journal())
            make_private(self._folder)
            shutil.rmtree(self._folder)  # of a conversion to this place that was killed
            make_private(self._folder)
        except BaseException:
            self._lock.release()
            raise
        self.work = self._folder
        return self

    def _take_lock(self) -> None:
        seen, own = self._lock.look(), own_origin(os.environ)
        if seen is not None and not seen.is_over(own):
            line = (
                f"DST={self.path} is that of another conversion: watching for {LOCK_STALE_S:.0f} s"
            )
            print(f"{line} whether it is alive", file=sys.stderr)
            now = watch_lock(self._lock, seen, LOCK_STALE_S)
            if now is not None and now != seen:
                raise ConfigError(
                    f"DST={self.path} is being written by {now.holder}. Wait for its end, or name another "
                    "one."
                )
            seen = now
        if not self._lock.take("convert", seen, own):
            raise ConfigError(
                f"DST={self.path} must be new, and another conversion has just begun there. Name another "
                "one, or wait for its end."
            )
        self._lock.start(lambda line: print(f"warning: {line}", file=sys.stderr))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Upload what is left, last what makes it a checkpoint; remove all if the source is at fault."""
        try:
            if kind is None:
                self._check_lock()
                for path in sorted(self._files(), key=_place_in_order):
                    self._upload(path)
                self._storage.remove(self._at(JOURNAL))
            elif issubclass(kind, MoeFtError) and not issubclass(kind, LockLostError):
                with suppress(OSError):
                    for noted in self._shards.values():
                        self._storage.remove(self._at(noted["path"]))
                    self._storage.remove(self._at(JOURNAL))
        finally:
            with suppress(OSError):
                self._lock.release()
            shutil.rmtree(self.work, ignore_errors=True)

    def _check_lock(self) -> None:
        try:
            self._lock.check()
        except LockLostError as error:
            raise LockLostError(
                f"DST={self.path}: another conversion has taken over, as this one did not answer for a "
                "while. This one ends, and leaves everything to the other."
            ) from error

    def _files(self) -> Iterator[Path]:
        return (each for each in self.work.rglob("*") if each.is_file())

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
                        f"{self.path}/{relative} is not what was uploaded. Is the store sound?"
                    )
                num_bytes += len(piece)
        if self._storage.size(where) != num_bytes:
            raise CorruptStateError(
                f"{self.path}/{relative} has another size than what was uploaded"
            )
        return {"path": relative, "version": self._storage.version(where)}

    def written(self, shard: str) -> Any:
        """Return what was noted of a shard, None if it is still to be written."""
        noted = self._shards.get(shard)
        return None if noted is None else noted["facts"]

    def note(self, shard: str, facts: Mapping[str, Any]) -> None:
        """Upload the file of a shard, which is written and verified, and note that.

        Args:
            facts: that the end of the conversion needs, with the name of the file.
        """
        self._check_lock()
        (path,) = self.work.rglob(facts["file"])
        self._shards[shard] = {**self._upload(path), "facts": facts}
        self._storage.write_atomically(self._at(JOURNAL), self._journal())
        path.unlink()

    def _journal(self) -> bytes:
        journal = {"description": self._description, "plan": self._plan, "shards": self._shards}
        return json.dumps(journal).encode()


def _pieces(file: Any) -> Iterator[bytes]:
    return iter(lambda: file.read(_PIECE_BYTES), b"")


def _place_in_order(path: Path) -> int:
    return _LAST.index(path.name) if path.name in _LAST else -1
