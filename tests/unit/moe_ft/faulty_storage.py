"""File systems that fail at chosen operations: a local directory and an object store.

`install` makes their protocols known to fsspec and counts every operation, also those that
files/storage.py does on local files without fsspec. A kill is an exception that no
`except Exception` catches, and after it nothing works any more; a failure is an OSError, after which
the next operation works again.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from moe_ft.calls import write_all
from moe_ft.files.progress import call_within

LOCAL_PROTOCOL, OBJECT_PROTOCOL = "faulty-local", "faulty-objects"


class KilledError(BaseException):
    """The process ends here."""


class Injector:
    """Decides which operations fail, and remembers all of them.

    Attributes:
        operations: (name, path) of those since the last `forget`.
        fails_at: numbers of operations that fail, from 0.
        killed_at: number of the operation before which the process is killed.
        broken: operations that fail whatever their number, by name and end of the path.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let everything work, and count from 0."""
        self.operations: list[tuple[str, str]] = []
        self.fails_at: frozenset[int] = frozenset()
        self.killed_at: int | None = None
        self.broken: tuple[tuple[str, str], ...] = ()

    def step(self, name: str, path: str) -> None:
        """Count an operation; raise if it is to fail."""
        number = len(self.operations)
        self.operations.append((name, path))
        if self.killed_at is not None and number >= self.killed_at:
            raise KilledError
        is_broken = any(name == each and path.endswith(end) for each, end in self.broken)
        if is_broken or number in self.fails_at:
            raise OSError(5, f"injected failure of {name}", path)


INJECTOR = Injector()


def _write(file: int, pieces: Iterable[memoryview]) -> None:
    """Count, then write; if that fails, half of a piece."""
    for piece in pieces:
        try:
            INJECTOR.step("write", os.readlink(f"/proc/self/fd/{file}"))
        except (OSError, KilledError):
            os.write(file, piece[: len(piece) // 2])
            raise
        write_all(file, piece)


def _open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
    if flags & os.O_CREAT and str(path).endswith(".part"):
        INJECTOR.step("open", str(path))
    return _real_open(path, flags, *args, **kwargs)


_real_open = os.open


class FaultyLocalFileSystem(LocalFileSystem):
    """A local directory."""

    protocol = (LOCAL_PROTOCOL, "file")
    cachable = False

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        INJECTOR.step("open", path)
        return super()._open(path, mode, block_size, **kwargs)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Count, then create."""
        INJECTOR.step("makedirs", path)
        super().makedirs(path, exist_ok=exist_ok)

    def info(self, path: Any, **kwargs: Any) -> Any:
        """Count, then look."""
        INJECTOR.step("info", os.fspath(path))
        return super().info(path, **kwargs)

    def rmdir(self, path: str) -> None:
        """Count, then remove."""
        INJECTOR.step("rmdir", path)
        super().rmdir(path)


class FaultyObjectStore(MemoryFileSystem):
    """An object store: what is written appears all at once."""

    protocol = OBJECT_PROTOCOL
    cachable = False
    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(os.fspath(path).removeprefix(f"{OBJECT_PROTOCOL}://"))

    def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        INJECTOR.step("open", path)
        return super()._open(path, *args, **kwargs)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        """Count, then read."""
        INJECTOR.step("cat_file", path)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Count, then create."""
        INJECTOR.step("makedirs", path)
        super().makedirs(path, exist_ok=exist_ok)

    def info(self, path: str, **kwargs: Any) -> Any:
        """Count, then look."""
        INJECTOR.step("info", path)
        return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """Count, then list."""
        INJECTOR.step("ls", path)
        return super().ls(path, detail=detail, **kwargs)

    def rm_file(self, path: str) -> None:
        """Count, then remove."""
        INJECTOR.step("rm_file", path)
        super().rm_file(path)

    def rmdir(self, path: str) -> None:
        """Count, then remove."""
        INJECTOR.step("rmdir", path)
        super().rmdir(path)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        directory = (
            f"{os.readlink(f'/proc/self/fd/{each}')}/" if (each := kwargs.get("dir_fd")) else ""
        )
        INJECTOR.step(name, f"{directory}{first}")
        return function(first, *args, **kwargs)

    return call


@contextmanager
def install() -> Iterator[Injector]:
    """Make both file systems usable by URL, and local renames and syncs fail like the rest."""
    fsspec.register_implementation(LOCAL_PROTOCOL, FaultyLocalFileSystem, clobber=True)
    fsspec.register_implementation(OBJECT_PROTOCOL, FaultyObjectStore, clobber=True)
    FaultyObjectStore.store.clear()
    FaultyObjectStore.pseudo_dirs[:] = [""]
    INJECTOR.forget()
    with pytest.MonkeyPatch.context() as patch:
        functions: dict[str, Callable[..., Any]] = {
            "replace": os.replace,
            "unlink": os.unlink,
            "fsync": lambda descriptor: None,  # no power fails here
        }
        for name, function in functions.items():
            patch.setattr(f"moe_ft.files.local_files.os.{name}", _counted(name, function))
        patch.setattr("moe_ft.files.local_files.os.open", _open)
        patch.setattr("moe_ft.files.local_files.write_past_cache", _write)
        yield INJECTOR
    INJECTOR.forget()


def give_up_soon(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Have one operation on storage given up soon, and all others late: a machine may be busy."""

    def call(act: Callable[[], Any], patience_s: float, what: str) -> Any:
        return call_within(act, 0.25 if operation in what else 120.0, what)

    monkeypatch.setattr("moe_ft.files.storage.call_within", call)


def faulty_urls(directory: Path) -> dict[str, str]:
    """Return a URL of an empty persist directory on each of the file systems."""
    return {"local": f"{LOCAL_PROTOCOL}://{directory}/persist", "objects": f"{OBJECT_PROTOCOL}://p"}
