"""Directories and files that nobody else can change or replace: how they are made, opened and checked.

Memory directories lie in places that every user of a node may write to. What is found there is trusted only
if it is ours: a check of what a path names is worth nothing once it is opened again by its path, so files are
opened relative to the descriptor of a directory that was checked, and no link is followed. Which directories
there are is engine/memory/job_directory.py.

What a user names may be anybody's, but it must be a file: opening a named pipe may never return.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from moe_ft.calls import looks_again, write_all
from moe_ft.errors import CorruptStateError, ForeignPathError, UnsafePathError

PRIVATE_MODE = 0o700
_FILE_MODE = 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT_UID = 0
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def make_root(directory: Path) -> None:
    """Create a directory that the user named, or accept it as it is if what we create in it stays ours.

    It may be open to others, as /dev/shm is, if they cannot rename or remove what is not theirs.

    Raises:
        UnsafePathError: if another user could replace what is created in it.
        OSError: if it cannot be created, or is no directory.
    """
    _make(directory)
    if directory.is_symlink():
        _check_owner(directory.lstat(), f"{directory} is a symbolic link that", (_ROOT_UID,))
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    _check_owner(status, str(directory), (_ROOT_UID,))
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise UnsafePathError(
            f"{directory} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}), who could "
            "replace what is in it"
        )


def make_private(directory: Path) -> None:
    """Create a directory that only its user may enter; one that is there must be ours already.

    Raises:
        UnsafePathError: if it is a link, belongs to another user, or other users can write to it.
        OSError: if it cannot be created, or is no directory.
    """
    _make(directory)
    with open_directory(directory):
        pass


def _make(directory: Path) -> None:
    """Create a directory and those above it that are missing; what exists stays as it is."""
    try:
        directory.mkdir(mode=PRIVATE_MODE)
    except FileExistsError:
        return
    except FileNotFoundError:
        if directory.parent == directory:
            raise
        _make(directory.parent)
        with suppress(FileExistsError):  # another rank's, just now
            directory.mkdir(mode=PRIVATE_MODE)


@contextmanager
def open_directory(directory: Path) -> Iterator[int]:
    """Yield a descriptor of a directory that is ours.

    Raises:
        UnsafePathError: if it is a link, belongs to another user, or other users can write to it.
        OSError: if it cannot be opened, or is no directory.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if directory.is_symlink():
            raise UnsafePathError(f"{directory} is a symbolic link") from error
        raise
    try:
        _check_is_ours(os.fstat(descriptor), directory)
        yield descriptor
    finally:
        os.close(descriptor)


def open_private(path: Path) -> BinaryIO:
    """Open a file of ours for reading.

    Raises:
        UnsafePathError: if the file or its directory is a link, belongs to another user, or other users can
            write to it.
        OSError: if it cannot be opened.
    """
    with open_directory(path.parent) as directory:
        return os.fdopen(_open(directory, path, os.O_RDONLY), "rb")


def read_private(path: Path) -> bytes:
    """Return what is in a small file of ours; see `open_private`."""
    with open_private(path) as file:
        return file.read()


@looks_again()
def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, whoever owns it.

    Raises:
        CorruptStateError: if it is a named pipe, a device or a socket.
        OSError: if it cannot be opened, or is a directory.
    """
    check_is_regular(path)
    # Without waiting, for the case that another file has taken its place.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    return os.fdopen(descriptor, "rb")


def check_is_regular(path: Path | str) -> int:
    """Return the size of a file; raise CorruptStateError if it is a named pipe, a device or a socket."""
    status = os.stat(path)  # without opening it
    mode = status.st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a directory, opening it says so
        raise CorruptStateError(
            f"{path} is not a regular file, but {_KINDS.get(stat.S_IFMT(mode))}"
        )
    return status.st_size


def create_private(path: Path) -> int:
    """Return a descriptor to read and write a file of ours, which is created if it is not there.

    Raises:
        UnsafePathError: as `open_private` does.
        OSError: if it cannot be created.
    """
    with open_directory(path.parent) as directory:
        return _open(directory, path, os.O_RDWR | os.O_CREAT)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees all of it or nothing.

    Raises:
        UnsafePathError: if its directory is not ours.
        OSError: if there is no room, or the directory has vanished.
    """
    temporary = f".{path.name}.{os.getpid()}"
    with open_directory(path.parent) as directory:
        with suppress(FileNotFoundError):  # of a process of that number that was killed
            os.unlink(temporary, dir_fd=directory)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, _FILE_MODE, dir_fd=directory)
            try:
                write_all(descriptor, content)
            finally:
                os.close(descriptor)
            os.rename(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise


def replace_file(path: Path, text: str) -> None:
    """Write a file where others may write too: under a name that they do not know, so that no link counts."""
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _open(directory: int, path: Path, flags: int) -> int:
    """Open a file in a directory that was checked, and check it too."""
    # Without waiting: a named pipe would block, and is refused below.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path.name, flags, _FILE_MODE, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafePathError(f"{path} is a symbolic link") from error
        raise type(error)(error.errno, error.strerror, str(path)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafePathError(f"{path} is not a regular file")
        _check_is_ours(status, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_is_ours(status: os.stat_result, path: Path) -> None:
    _check_owner(status, str(path))
    if status.st_mode & _OTHERS_WRITE:
        raise UnsafePathError(
            f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
        )


def _check_owner(status: os.stat_result, what: str, others: tuple[int, ...] = ()) -> None:
    if status.st_uid not in (os.geteuid(), *others):
        raise ForeignPathError(f"{what} belongs to user {status.st_uid}, not to {os.geteuid()}")
