"""System calls on files in the places of the real ones, for simulated threads.

Each passes its moment first (`Files.reach`), where its process may die, and the call may fail.
"""

import errno
import fcntl
import os
import posix
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.simulation.active import World
from tests.simulation.durability import STORAGE

if TYPE_CHECKING:
    from tests.simulation.files import Files, OpenFile

_DISK_BYTES = 1 << 40


def _os_open(
    world: World, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> int:
    files = world.files
    place = files.relative(path, dir_fd)
    if place is None:
        number = posix.open(path, flags, mode, dir_fd=dir_fd)
        files.own(number, None)
        return number
    return files.open(place, files._prefix + place, flags, mode)


def _close(world: World, descriptor: int) -> None:
    files = world.files
    if files.held(descriptor) is not None:
        files.forget(descriptor)
    posix.close(descriptor)


def _write(world: World, descriptor: int, data: Any) -> int:
    found = world.files.held(descriptor)
    if found is None or found.path is None:
        return posix.write(descriptor, data)
    return world.files.write(found, data)


def _pwrite(world: World, descriptor: int, data: Any, offset: int) -> int:
    found = world.files.held(descriptor)
    if found is None or found.path is None:
        return posix.pwrite(descriptor, data, offset)
    return world.files.write(found, data, offset)


def _fsync(world: World, descriptor: int) -> None:
    files = world.files
    found = files.held(descriptor)
    if found is None or found.path is None:
        return
    try:
        files.reach("fsync", found.path)
    except OSError:
        files.durability.failed_to_sync(found.inode)
        raise
    if found.inode:
        files.durability.synced(found.inode)


def _ftruncate(world: World, descriptor: int, length: int) -> None:
    found = world.files.held(descriptor)
    if found is None or found.path is None:
        posix.ftruncate(descriptor, length)
    else:
        cut(world.files, found, length)


def cut(files: "Files", found: "OpenFile", length: int) -> None:
    assert found.path is not None
    files.reach("truncate", found.path)
    if found.inode:
        files.durability.before_write(found.inode, found.number)
    posix.ftruncate(found.number, length)


def _allocate(world: World, descriptor: int, offset: int, length: int) -> None:
    found = world.files.held(descriptor)
    if found is not None and found.path is not None:
        try:
            world.files.reach("allocate", found.path)
        except OSError as error:
            has_room = posix.fstat(descriptor).st_blocks * 512 >= offset + length
            if error.errno != errno.ENOSPC or not has_room:
                raise
    posix.posix_fallocate(descriptor, offset, length)


def flock(world: World, file: Any, operation: int) -> None:
    assert operation & (fcntl.LOCK_NB | fcntl.LOCK_UN), "nobody else could run meanwhile"
    descriptor = file if type(file) is int else file.fileno()
    found = world.files.held(descriptor)
    if found is not None and found.path is not None:
        world.files.reach("lock", found.path)
    _real_flock(descriptor, operation)


_real_flock = fcntl.flock


def _mkdir(world: World, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    files = world.files
    place = files.relative(path, dir_fd)
    if place is None:
        posix.mkdir(path, mode, dir_fd=dir_fd)
        return
    files.reach("mkdir", place)
    posix.mkdir(path, mode, dir_fd=dir_fd)
    if place.startswith(STORAGE):
        files.durability.made(place)
    files.changed(place)


def _removal(operation: str, remove: Callable[..., None], prepare: str) -> Callable[..., None]:
    def act(world: World, path: Any, *, dir_fd: int | None = None) -> None:
        files = world.files
        place = files.relative(path, dir_fd)
        if place is None:
            remove(path, dir_fd=dir_fd)
            return
        files.reach(operation, place)
        if place.startswith(STORAGE):
            done = getattr(files.durability, prepare)(place)
            remove(path, dir_fd=dir_fd)
            done()
        else:
            remove(path, dir_fd=dir_fd)
        files.changed(place)

    return act


def _rename(
    world: World,
    source: Any,
    target: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
) -> None:
    files = world.files
    place, start = files.relative(target, dst_dir_fd), files.relative(source, src_dir_fd)
    if place is None or start is None:
        posix.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        return
    files.reach("rename", place)
    done: Callable[[], None] | None = None
    if place.startswith(STORAGE):
        done = files.durability.renaming(start, place)
    posix.rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    if done is not None:
        done()
    files.changed(place)


def _link(
    world: World,
    source: Any,
    target: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
    follow_symlinks: bool = True,
) -> None:
    files = world.files
    place = files.relative(target, dst_dir_fd)
    if place is not None:
        files.reach("link", place)
    posix.link(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    if place is not None:
        if place.startswith(STORAGE):
            files.durability.added(place)
        files.changed(place)


def _utime(
    world: World,
    path: Any,
    times: Any = None,
    *,
    ns: tuple[int, int] | None = None,
    dir_fd: int | None = None,
    follow_symlinks: bool = True,
) -> None:
    files = world.files
    place = None if type(path) is int else files.relative(path, dir_fd)
    if place is not None:
        files.reach("touch", place)
    if times is not None:
        posix.utime(path, times, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
    else:
        virtual = (time.time_ns(),) * 2
        posix.utime(path, ns=ns or virtual, dir_fd=dir_fd, follow_symlinks=follow_symlinks)


def _stat(
    world: World, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True
) -> os.stat_result:
    if type(path) is not int and dir_fd is None:
        place = world.files.relative(path)
        if place is not None and place.startswith(STORAGE):
            world.files.reach("stat", place)
    return posix.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)


class _Listing:
    """The result of `os.scandir`."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def __enter__(self) -> "_Listing":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Do nothing: everything was read at once."""


def _reach_listing(world: World, path: Any) -> bool:
    """Return whether a directory is below the root; pass the moment before it is listed."""
    files = world.files
    if type(path) is int:
        found = files.held(path)
        place = None if found is None else found.path
    else:
        place = files.relative(path)
    if place is not None:
        files.reach("list", place)
    return place is not None


def _listdir(world: World, path: Any = ".") -> list[str]:
    is_ours = _reach_listing(world, path)
    names: list[str] = posix.listdir(path)
    if (
        is_ours and len(names) > 1
    ):  # file systems have no order, and chance must have the same every time
        names.sort()
        world.kernel.random.shuffle(names)
    return names


def _scandir(world: World, path: Any = ".") -> Any:
    if not _reach_listing(world, path):
        return posix.scandir(path)
    with posix.scandir(path) as found:
        entries = list(found)
    if len(entries) > 1:
        entries.sort(key=lambda entry: entry.name)
        world.kernel.random.shuffle(entries)
    return _Listing(entries)


def disk_usage(world: World, path: Any) -> Any:
    place = world.files.relative(path)
    is_full = place is not None and world.files.is_full(place)
    free = 0 if is_full else _DISK_BYTES // 2
    return _Usage(_DISK_BYTES, _DISK_BYTES - free, free)


_Usage = type(shutil.disk_usage("/"))


_unlink = _removal("remove", posix.unlink, "removing")
CALLS: dict[str, Callable[..., Any]] = {
    "open": _os_open,
    "close": _close,
    "write": _write,
    "pwrite": _pwrite,
    "fsync": _fsync,
    "fdatasync": _fsync,
    "ftruncate": _ftruncate,
    "posix_fallocate": _allocate,
    "mkdir": _mkdir,
    "unlink": _unlink,
    "remove": _unlink,
    "rmdir": _removal("rmdir", posix.rmdir, "removing_directory"),
    "rename": _rename,
    "replace": _rename,
    "link": _link,
    "utime": _utime,
    "stat": _stat,
    "listdir": _listdir,
    "scandir": _scandir,
}
