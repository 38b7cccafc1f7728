"""Checks of the persist directory: what the product relies on, its lock and room, and how fast all nodes are.

One node checks the first three. Every node writes a file and reads that of the next one, which shows at once
that they have the same storage, and how fast it is out of no cache.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from moe_ft.config.fields import size_text
from moe_ft.doctor.rows import CheckRow, failed, passed, rate_text, refused, warned
from moe_ft.engine.persist.storage_lock import (
    LOCK_NAME,
    LOCK_RENEWAL_S,
    LOCK_STALE_S,
    StorageLock,
    own_origin,
)
from moe_ft.errors import ConfigError
from moe_ft.files.progress import PATIENCE_S, SLOWEST_BYTES_PER_S
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum
from moe_ft.launches import launch_of
from moe_ft.recovery.persist_directory import check_nobody_renews

_SEMANTICS, _LOCK, _SPACE = "storage", "storage lock", "storage room"
_PLACE = "persist dir"
_WATCH_S = LOCK_RENEWAL_S + 3.0
_PROBE = ".moe_ft_doctor_"
_SPEED_FILE = "data"
_SPEED_PATH = re.compile(rf"{re.escape(_PROBE)}[0-9a-f]{{16}}/{_SPEED_FILE}")
_REMEDY = "Name a directory or object store that does this, or ask its administrator."


def is_path_of_a_probe(path: str) -> bool:
    """Return whether a path below the persist directory is that of the file that a node writes for others."""
    return _SPEED_PATH.fullmatch(path) is not None


class ProbeDirectory:
    """A directory of this process below the persist directory that is gone after `close`."""

    def __init__(self, url: str) -> None:
        """Choose a name; raises OSError if the persist directory cannot be opened."""
        self._name = f"{_PROBE}{secrets.token_hex(8)}"
        self.root = Storage(url, PATIENCE_S)
        self.storage = Storage(f"{url.rstrip('/')}/{self._name}", PATIENCE_S)
        self.speed_path = f"{self._name}/{_SPEED_FILE}"  # in `root`, as other nodes read it
        self._created: list[Path] = []
        self._is_open = False

    def open(self) -> None:
        """Create both directories; raises OSError if that fails, or if the probe's is there already."""
        top = self.root.local_path(LOCK_NAME)
        if top is not None:
            self._created = [each for each in top.parents if not each.exists()]
        self.root.make_root()
        own = self.root.local_path(self._name)
        if own is not None:  # object stores have no directories
            self.root.within_patience("create a directory", own.mkdir)
        self._is_open = True

    def close(self) -> None:
        """Remove the files that the checks write, and directories that `open` has created if they are empty.

        Whatever else is there stays. It may be called again.
        """
        if self._is_open:
            for path in (_SPEED_FILE, *_FILES):
                with suppress(OSError):
                    self.storage.remove(path)
            self.storage.remove_directory(_SUBDIRECTORY)
            self.root.remove_directory(self._name)
            self._is_open = False
        for directory in self._created:
            with suppress(OSError):
                directory.rmdir()


def check_semantics(storage: Storage) -> list[CheckRow]:
    """Return a row on what the product does with storage, done in an empty directory."""
    for name, act in _OPERATIONS.items():
        try:
            problem = "" if act(storage) else "gave another result than it must"
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            return [failed(_SEMANTICS, _PLACE, f"{name}: {problem}", _REMEDY)]
    return [passed(_SEMANTICS, _PLACE, ", ".join(_OPERATIONS))]


_SUBDIRECTORY, _SMALL = "iter_0000001", "small"
_LARGE = f"{_SUBDIRECTORY}/data"
_FILES = (_LARGE, _SMALL, LOCK_NAME)  # of the operations below


def _creates(storage: Storage) -> bool:
    storage.write(_LARGE, [memoryview(b"some data")])
    return storage.read(_LARGE, 5, 4) == b"data"


def _replaces(storage: Storage) -> bool:
    storage.write_atomically(_SMALL, b"first")
    storage.write_atomically(_SMALL, b"second one")
    return storage.read(_SMALL) == b"second one" and storage.size(_SMALL) == len(b"second one")


def _lists(storage: Storage) -> bool:
    sizes = storage.sizes_in(_SUBDIRECTORY)
    return storage.iterations() == [1] and sizes == {"data": len(b"some data")}


def _locks(storage: Storage) -> bool:
    first, second = StorageLock(storage), StorageLock(storage)
    has_first, has_second = first.take("doctor", None), second.take("another doctor", None)
    first.renew()
    first.release()
    return has_first and not has_second and first.look() is None


def _deletes(storage: Storage) -> bool:
    storage.remove(_SMALL)
    storage.remove(_LARGE)
    storage.remove_directory(_SUBDIRECTORY)
    return not storage.exists(_SMALL) and storage.iterations() == []


_OPERATIONS = {
    "create": _creates,
    "replace": _replaces,
    "list": _lists,
    "lock": _locks,
    "delete": _deletes,
}


def check_lock(root: Storage, watch_s: float = _WATCH_S) -> list[CheckRow]:
    """Return a row on the lock of the persist directory, which a start would watch too, also one of its job.

    Args:
        watch_s: a start that runs renews it in that time.
    """
    lock = StorageLock(root)
    seen = lock.look()
    if seen is None:
        return [passed(_LOCK, _PLACE, "free")]
    if seen.is_over(own_origin(launch_of(os.environ))):
        return [passed(_LOCK, _PLACE, f"of {seen.holder}, which is over: a start takes it at once")]
    try:
        if check_nobody_renews(root, lock, seen, watch_s) is None:
            return [passed(_LOCK, _PLACE, f"{seen.holder} has just given it up")]
    except ConfigError as error:
        return [refused(_LOCK, _PLACE, error)]
    found = f"of {seen.holder}, not renewed in {watch_s:.0f} s"
    remedy = f"Nothing if that job is dead: a start waits {LOCK_STALE_S:.0f} s and takes it over."
    return [warned(_LOCK, _PLACE, found, remedy)]


def check_space(root: Storage, needed: int | None, num_checkpoints: int) -> list[CheckRow]:
    """Return a row on the room for checkpoints.

    Args:
        needed: bytes of all of them; None if nothing is planned.
    """
    place = root.local_path(LOCK_NAME)
    what = "" if needed is None else f"{size_text(needed)} for {num_checkpoints} checkpoints"
    if place is None:
        return [passed(_SPACE, _PLACE, f"an object store; {what or 'nothing is planned'}")]
    there = next(each for each in place.parents if each.exists())
    free, status = shutil.disk_usage(there).free, os.statvfs(there)
    found = ", ".join(filter(None, [f"{size_text(free)} free", what]))
    if status.f_files and status.f_favail < 1000:
        remedy = "Remove files, or name another --moe-ft-persist-dir."
        return [failed(_SPACE, _PLACE, f"room for {status.f_favail} more files", remedy)]
    if needed is not None and free < needed:
        remedy = "Lower --moe-ft-keep, remove old checkpoints (`moe_ft prune`), or name another directory."
        return [failed(_SPACE, _PLACE, found, remedy)]
    return [passed(_SPACE, _PLACE, found)]


_WRITE, _READ = "storage write", "storage read"
_PIECE_BYTES = 8 << 20
_SHARE = "All nodes need the same storage at this path or URL: a mounted file system, or an object store."


class ProbeFile(msgspec.Struct, frozen=True):
    """File that a node has written; the path is in the persist directory."""

    path: str
    num_bytes: int
    seconds: float
    checksum: str


def write_file(storage: Storage, path: str, num_bytes: int, most_s: float = 1.0) -> ProbeFile:
    """Write a file as a checkpoint is written; raises OSError if that fails.

    Args:
        most_s: after which no more is written; bringing it to the disk may take longer.
    """
    content = secrets.token_bytes(min(_PIECE_BYTES, num_bytes))
    pieces: list[memoryview] = []
    start_s = time.perf_counter()

    def produce() -> Iterator[memoryview]:
        left = num_bytes
        while left > 0 and (not pieces or time.perf_counter() - start_s < most_s):
            pieces.append(memoryview(content)[:left])
            left -= len(pieces[-1])
            yield pieces[-1]

    storage.write(path, produce())
    took_s = time.perf_counter() - start_s
    with suppress(OSError):
        storage.forget_cached(path)
    return ProbeFile(path, sum(map(len, pieces)), took_s, checksum(b"".join(pieces)))


def check_write(
    node: str, written: ProbeFile, checkpoint_bytes: int | None, saving_s: float | None = None
) -> list[CheckRow]:
    """Return a row on the speed of a write.

    Args:
        checkpoint_bytes: of the node; None if nothing is planned.
        saving_s: seconds that a planned end leaves for it; None if that is not known.
    """
    row = _speed(_WRITE, node, written.num_bytes, written.seconds, checkpoint_bytes)
    needed_s = (checkpoint_bytes or 0) * written.seconds / max(written.num_bytes, 1)
    if saving_s is None or needed_s <= saving_s:
        return [row]
    found = f"{row.found}; a planned end leaves {saving_s:.0f} s for it (keep --grace)"
    remedy = "Have what ends the job wait longer before it kills, and give keep --grace that."
    return [warned(_WRITE, node, found, remedy)]


def check_read(
    node: str,
    storage: Storage,
    written: Mapping[str, ProbeFile],
    checkpoint_bytes: int | None,
) -> list[CheckRow]:
    """Return a row on reading the file of the next node; `written` has the same order on all nodes."""
    nodes = list(written)
    other = nodes[(nodes.index(node) + 1) % len(nodes)] if node in nodes else nodes[0]
    if not is_path_of_a_probe(written[other].path):
        found = f"{other} names '{written[other].path}', which is no file of doctor"
        return [failed(_READ, node, found, "Look at that node, and who else writes to the store.")]
    start_s = time.perf_counter()
    try:
        content = storage.read(written[other].path, 0, storage.size(written[other].path))
    except FileNotFoundError:
        return [failed(_READ, node, f"the file of {other} is not there", _SHARE)]
    took_s = time.perf_counter() - start_s
    if checksum(content) != written[other].checksum:
        found = f"the file of {other} has another content than was written"
        return [failed(_READ, node, found, "Do not use this storage: it damages files.")]
    row = _speed(_READ, node, len(content), took_s, checkpoint_bytes)
    if other == node:
        return [row]
    return [msgspec.structs.replace(row, found=f"{row.found}, from {other}")]


def _speed(
    check: str, node: str, num_bytes: int, seconds: float, checkpoint_bytes: int | None
) -> CheckRow:
    rate = num_bytes / max(seconds, 1e-9)
    found = rate_text(num_bytes, seconds)
    if checkpoint_bytes is not None:
        found += f"; the node's part of a checkpoint takes {checkpoint_bytes / rate:.1f} s"
    if rate < SLOWEST_BYTES_PER_S:
        remedy = (
            f"Below {SLOWEST_BYTES_PER_S / 1e6:.0f} MB/s a write is given up. Name faster storage."
        )
        return warned(check, node, found, remedy)
    return passed(check, node, found)
