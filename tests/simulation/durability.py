"""Power loss of a shared file system: what was synced survives, and of the rest whatever chance decides.

Data of a file counts once the file was synced, an entry of a directory once the directory was. Nothing here
acts on behalf of a simulated process: files.py says what such a process does.
"""

import os
import posix
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STORAGE = "storage"  # the shared file system, below the root
_SHARES = (0.0, 0.3, 0.7, 1.0)


@dataclass(eq=False, slots=True, kw_only=True)
class _Change:
    """A change of directories that is not on the disk yet. Paths are relative to the root.

    Attributes:
        kind: add, remove, mkdir, rmdir or rename.
        directory: inode of the directory.
        source: of a rename.
        source_directory: its inode.
        saved: another name of the file that was removed or replaced; empty if there was none.
        removed: inode of the directory that was removed.
    """

    kind: str
    path: str
    directory: int
    source: str = ""
    source_directory: int = 0
    saved: str = ""
    removed: int = 0

    @property
    def entries(self) -> set[tuple[int, str]]:
        found = {(self.directory, self.path.rpartition("/")[2])}
        if self.source:
            found.add((self.source_directory, self.source.rpartition("/")[2]))
        return found

    def __str__(self) -> str:
        return f"{self.kind} {self.source + ' -> ' if self.source else ''}{self.path}"


class Durability:
    """Keeps what is needed to undo what was not synced."""

    def __init__(self, root: Path, aside: Path) -> None:
        """Begin.

        Args:
            root: of relative paths.
            aside: an empty directory on the same file system, for removed files.
        """
        self._root, self._aside = f"{root}/", f"{aside}/"
        self._count = 0
        self._changes: list[_Change] = []
        self._unsynced: dict[int, bytes] = {}  # by inode: what is on the disk
        self._inodes: dict[str, int] = {}  # of directories in which something has changed
        self._lost: set[int] = set()  # inodes whose pages are gone for good, as after a failed sync

    # Data of files

    def before_open(self, path: str, flags: int) -> bytes | None:
        """Return what a file holds if opening it may remove that; None for a file that is not there."""
        if flags & os.O_EXCL:
            return None
        try:
            if not flags & os.O_TRUNC:
                posix.stat(self._root + path)
                return b""
            return _content(self._root + path)
        except FileNotFoundError:
            return None

    def opened(self, path: str, descriptor: int, flags: int, before: bytes | None) -> int:
        """Note that a file was opened for writing; return its inode."""
        inode = posix.fstat(descriptor).st_ino
        if before is None:
            self._note("add", path)
        elif flags & os.O_TRUNC:
            self._lost.discard(inode)
            if before:
                self._unsynced.setdefault(inode, before)
        return inode

    def before_write(self, inode: int, descriptor: int) -> None:
        """Keep what is on the disk of a file that is about to change."""
        if inode not in self._unsynced:
            is_empty = posix.fstat(descriptor).st_size == 0
            self._unsynced[inode] = b"" if is_empty else _content(f"/proc/self/fd/{descriptor}")

    def synced(self, inode: int) -> None:
        if inode not in self._lost:
            self._unsynced.pop(inode, None)
        if any(change.directory == inode for change in self._changes):
            for change in self._changes:
                if change.directory == inode and change.saved:
                    posix.unlink(change.saved)
            self._changes = [each for each in self._changes if each.directory != inode]

    def failed_to_sync(self, inode: int) -> None:
        """Note that syncing a file failed: Linux drops its pages then, and a second try succeeds in vain."""
        if inode in self._unsynced:
            self._lost.add(inode)

    # Entries of directories

    def added(self, path: str) -> None:
        self._note("add", path)

    def made(self, path: str) -> None:
        self._inodes.pop(path, None)
        self._note("mkdir", path)

    def removing(self, path: str) -> Callable[[], None]:
        """Prepare for the removal of a file; call the result once it is removed."""
        saved = self._save(path)
        return lambda: self._note("remove", path, saved=saved)

    def removing_directory(self, path: str) -> Callable[[], None]:
        """Prepare for the removal of a directory; call the result once it is removed."""
        removed = posix.stat(self._root + path).st_ino
        return lambda: self._note("rmdir", path, removed=removed)

    def renaming(self, source: str, path: str) -> Callable[[], None]:
        """Prepare for a rename of a file; call the result once it is done."""
        assert source not in self._inodes, "renaming directories is not foreseen here"
        saved = self._save(path)
        parent = self._parent(source)
        return lambda: self._note(
            "rename", path, saved=saved, source=source, source_directory=parent
        )

    def _note(
        self,
        kind: str,
        path: str,
        *,
        saved: str = "",
        removed: int = 0,
        source: str = "",
        source_directory: int = 0,
    ) -> None:
        self._changes.append(
            _Change(
                kind=kind,
                path=path,
                directory=self._parent(path),
                source=source,
                source_directory=source_directory,
                saved=saved,
                removed=removed,
            )
        )

    def _parent(self, path: str) -> int:
        directory = path.rpartition("/")[0]
        found = self._inodes.get(directory)
        if found is None:
            found = self._inodes[directory] = posix.stat(self._root + directory).st_ino
        return found

    def _save(self, path: str) -> str:
        saved = f"{self._aside}{self._count}"
        try:
            posix.link(self._root + path, saved)
        except OSError:  # nothing is there, or a directory: the operation itself says so
            return ""
        self._count += 1
        return saved

    # Power loss

    def lose_power(self, chance: random.Random) -> list[str]:
        """Undo what need not have survived, as chance decides; return what that was.

        No simulated process that uses these files may be alive.
        """
        undone = self._undo_changes(chance)
        lost = []
        for directory, directories, names in os.walk(self._root + STORAGE):
            directories.sort()  # chance must not depend on their order on the disk
            for name in sorted(names):
                path = f"{directory}/{name}"
                inode = posix.stat(path).st_ino
                if inode in self._unsynced:
                    lost += self._lose_data(path, inode, chance)
        for change in self._changes:
            if change.saved and os.path.exists(change.saved):
                posix.unlink(change.saved)
        self._changes.clear()
        self._inodes.clear()
        self._unsynced.clear()
        self._lost.clear()
        return undone + lost

    def _undo_changes(self, chance: random.Random) -> list[str]:
        share = chance.choice(_SHARES)
        undone: list[str] = []
        kept: set[tuple[int, str]] = set()
        again: dict[int, int] = {}  # by inode of a directory that was removed: of that in its place
        for change in reversed(self._changes):
            entries = change.entries
            is_possible = kept.isdisjoint(entries) and self._has_directory(change, again)
            if is_possible and chance.random() < share:
                self._undo(change, again)
                undone.append(f"undone: {change}")
            else:
                kept |= entries
        return undone

    def _has_directory(self, change: _Change, again: dict[int, int]) -> bool:
        try:
            self._inodes.clear()
            return self._parent(change.path) == again.get(change.directory, change.directory)
        except OSError:
            return False

    def _undo(self, change: _Change, again: dict[int, int]) -> None:
        full = self._root + change.path
        if change.kind == "add":
            posix.unlink(full)
        elif change.kind == "mkdir":
            shutil.rmtree(full)
        elif change.kind == "rmdir":
            posix.mkdir(full)
            again[change.removed] = posix.stat(full).st_ino
        elif change.kind == "rename":
            posix.rename(full, self._root + change.source)
        if change.saved:
            posix.rename(change.saved, full)
            change.saved = ""

    def _lose_data(self, path: str, inode: int, chance: random.Random) -> list[str]:
        before, now = self._unsynced[inode], _content(path)
        after = before if inode in self._lost else damaged(before, now, chance)
        if after == now:
            return []
        mode = stat.S_IMODE(posix.stat(path).st_mode)
        descriptor = posix.open(path, os.O_WRONLY | os.O_TRUNC, mode)
        posix.write(descriptor, after)
        posix.close(descriptor)
        name = path.removeprefix(self._root)
        return [f"lost data: {name}: {len(before)} B on the disk, {len(now)} B written"]


def damaged(before: bytes, now: bytes, chance: random.Random) -> bytes:
    """Return what a file may hold whose last content did not all reach the disk."""
    cut = chance.randrange(len(now) + 1)
    rest = len(now) - cut
    outcomes = (
        now,
        before,
        now[:cut],
        now[:cut] + bytes(rest),
        now[:cut] + chance.randbytes(rest),
        now[:cut] + before[cut:],
    )
    return chance.choice(outcomes)


def _content(path: str) -> bytes:
    descriptor = posix.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return posix.read(descriptor, posix.fstat(descriptor).st_size)
    finally:
        posix.close(descriptor)
