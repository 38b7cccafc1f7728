"""The files of a persist directory, through fsspec: names, writing, reading, listing.

Local files are written, and read back, past the page cache where the file system can (O_DIRECT).

    iter_%07d/rank_%05d_TAG.safetensors, rank_%05d_TAG.json    one rank's state; TAG tells starts apart
    iter_%07d/manifest.json, manifest_LINEAGE.json             makes them a checkpoint; written last
    moe_ft.lock                                                which job writes here
    NAME.RANDOM.part                                           a file of this machine, while it is written

Manifests are engine/persist/manifests.py, what is deleted engine/persist/retention.py, the lock
engine/persist/storage_lock.py. Used by the writer process and by recovery; no torch.
"""

import copy
import errno
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
from fsspec.utils import get_protocol

from moe_ft.calls import looks_again
from moe_ft.config.rules import check_holds_no_secret
from moe_ft.errors import CorruptStateError
from moe_ft.files.apart import Helper
from moe_ft.files.back_ends import (
    as_of_files,
    call_ahead,
    create_object,
    give_own_random,
    piece_bytes,
    write_pieces,
)
from moe_ft.files.local_files import read_here, remove_here, sync_file, write_here
from moe_ft.files.private_files import check_is_regular, open_regular
from moe_ft.files.progress import call_within, note_progress, waiting
from moe_ft.format.encoding import check_path, checksum, decode
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.saying import warn

_ITERATION = re.compile(r"iter_(\d{7,})")
# A manifest of 16,384 ranks with 15,600 experts has 14 MiB. A stranger's may be a hole of 1 TB.
MOST_JSON_BYTES = 128 << 20
_OF_VERSIONS = (
    "size",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "ETag",
    "e_tag",
    "etag",
    "md5Hash",
)


def file_tag(identity: Identity, *, is_whole: bool = False) -> str:
    """Return what tells the files of one incarnation of one run from all others.

    A whole state may be of an iteration that has a checkpoint already, and does not overwrite its files.
    """
    end = " end" if is_whole else ""
    return checksum(f"{identity.lineage} {identity.history}{end}".encode())[:8]


def iteration_directory(iteration: int) -> str:
    """Return the directory of a checkpoint, relative to the persist directory."""
    return f"iter_{iteration:07d}"


def iteration_of(path: str) -> int:
    """Return the iteration of a checkpoint's file."""
    return int(path.partition("/")[0].removeprefix("iter_"))


def rank_path(iteration: int, rank: int, tag: str, suffix: str) -> str:
    """Return the path of one rank's file of a checkpoint."""
    return f"{iteration_directory(iteration)}/rank_{rank:05d}_{tag}.{suffix}"


class Storage:
    """One persist directory. Paths are relative to it; all methods raise OSError when it fails.

    Attributes:
        url: of the directory; it holds no password.
    """

    def __init__(
        self, url: str, patience_s: float | None = None, *, is_apart: bool = False
    ) -> None:
        """Name a directory; the back end is opened by the first operation.

        Args:
            url: a path, or a URL that fsspec understands.
            patience_s: how long a small operation, or reading the next piece of a file, may take before it
                raises TimeoutError; `write` takes as long as it needs. None in the writer process, which
                somebody else watches.
            is_apart: whether this process must be able to end while a file system of this machine hangs:
                another one then looks, lists, and reads and writes small files.
        """
        check_holds_no_secret("URL", url)
        self._helper = Helper() if is_apart else None
        self.url = url
        self._patience_s = patience_s

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the directory's path in it; some back ends need the network for that."""
        return self.within_patience("open", partial(_open, self.url))

    @cached_property
    def _is_local(self) -> bool:
        """True for a directory of this machine's file systems."""
        try:
            protocol = fsspec.get_filesystem_class(get_protocol(self.url)).protocol
        except (ImportError, ValueError):  # opening it says why
            return False
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def open(self) -> "Storage":
        """Open the back end now, and return this."""
        _ = self._opened
        return self

    @property
    def _file_system(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    def with_patience(self, patience_s: float | None) -> "Storage":
        """Return the same directory with another patience."""
        other = copy.copy(self)
        other._patience_s = patience_s
        if other._helper is not None:
            other._helper = Helper()  # that of this may wait, too
        return other

    def within_patience[Result](self, operation: str, act: Callable[[], Result]) -> Result:
        """Return what an operation returns; raise TimeoutError if it takes too long."""
        with self._translating(operation):
            act = looks_again()(act)
            if self._patience_s is None:
                return act()
            return call_within(act, self._patience_s, f"{self.url}: {operation}")

    @property
    def _works_apart(self) -> bool:
        return self._helper is not None and self._is_local

    def aside[Result](self, operation: str, act: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a function of a module returns, which another process may call; see `within_patience`.

        Its arguments are values that msgspec encodes.
        """
        if self._helper is None or not self._works_apart:
            return self.within_patience(operation, partial(act, *arguments))
        try:
            return self.within_patience(operation, partial(self._helper.perform, act, arguments))
        except TimeoutError:
            self._helper.abandon()
            self._helper = Helper()
            raise

    def _small(self, operation: str, method: str, *arguments: Any) -> Any:
        """Return what a method of this returns, in the same way."""
        if self._works_apart:
            return self.aside(operation, call_on, self.url, method, *arguments)
        return self.within_patience(operation, partial(getattr(self, method), *arguments))

    @contextmanager
    def _translating(self, operation: str) -> Iterator[None]:
        """Turn what the package of an object store raises into an OSError; it draws no number of training."""
        try:
            if not self._is_local:
                give_own_random()
            yield
        except Exception as error:
            translated = as_of_files(error, f"{self.url}: {operation}")
            if self._is_local or translated is error:
                raise
            raise translated from error

    def _full(self, path: str) -> str:
        check_path(path, "a path on storage")
        return f"{self._root.rstrip('/')}/{path}"

    def make_root(self) -> None:
        """Create the persist directory."""
        self._small("create the directory", "_make_root")

    def _make_root(self) -> None:
        is_new = self._is_local and not os.path.isdir(self._root)
        _make_directory(self._file_system, self._root)
        if is_new:
            sync_file(os.path.dirname(self._root))

    def write(self, path: str, pieces: Iterable[memoryview], num_bytes: int = 0) -> None:
        """Write a large file, of so many bytes if that is known; a local one is on the disk then."""
        full = self._full(path)
        with self._translating(f"write {path}"):
            _make_directory(self._file_system, full.rpartition("/")[0])
            if self._is_local:
                write_here(self._root, full, pieces)
            else:
                write_pieces(self._file_system, full, pieces, num_bytes)

    def write_atomically(self, path: str, content: bytes) -> None:
        """Write a small file so that readers see all of it or nothing."""
        self._small(f"write {path}", "_write_atomically", path, content)

    def _write_atomically(self, path: str, content: bytes) -> None:
        full = self._full(path)
        _make_directory(self._file_system, full.rpartition("/")[0])
        if self._is_local:
            write_here(self._root, full, [memoryview(content)])
        else:  # object stores show an object only when it is complete
            self._file_system.pipe_file(full, content)

    def create(self, path: str, content: bytes) -> None:
        """Write a small file to an object store; raises FileExistsError if it is there.

        Of several at the same time one succeeds; without a conditional put, the last one has written it.
        """
        act = partial(create_object, self._file_system, self._full(path), content, self._is_there)
        self.within_patience(f"create {path}", act)

    def read(self, path: str, offset: int = 0, num_bytes: int = -1) -> bytes:
        """Return a small file, or a range of one.

        Where many read at once each of them may be slow: only one that gets no further is given up.

        Raises:
            CorruptStateError: if a whole file is longer than any that holds JSON of moe_ft.
            OSError: if it cannot be read.
        """
        full = self._full(path)
        end = None if num_bytes < 0 else offset + num_bytes
        if num_bytes == 0:  # S3 has no empty ranges, and returns the whole object
            return b""
        if end is None and self._works_apart:
            return bytes(self._small(f"read {path}", "_read", full, offset, end))
        if end is None and self._patience_s is None:
            return self.within_patience(f"read {path}", partial(self._read, full, offset, end))
        expected_end = int(self._info(full).get("size") or 0) if end is None else end
        if end is None:
            _check_length(full, expected_end)
        size = piece_bytes(self._file_system, num_bytes)
        starts = range(offset, max(expected_end, offset + 1), size)
        stops = (*starts[1:], end if len(starts) == 1 else expected_end)
        reads = [
            partial(self.within_patience, f"read {path}", partial(self._read, full, *span))
            for span in zip(starts, stops, strict=True)
        ]
        pieces = list[bytes]()  # one of them is passed on without a copy
        found = call_ahead(self._file_system, reads)
        while len(pieces) < len(reads):
            with waiting(self._patience_s or 0.0):
                pieces.append(next(found))
            note_progress()
        return b"".join(pieces)

    def read_each(self, spans: Iterable[tuple[str, int, int]]) -> Generator[bytes | memoryview]:
        """Yield ranges of files, as path, offset and bytes, each valid until the next one is asked for."""
        if self._is_local and self._patience_s is None:
            return read_here((self._full(path), start, count) for path, start, count in spans)
        return call_ahead(self._file_system, (partial(self.read, *span) for span in spans))

    def _read(self, full: str, start: int, end: int | None) -> bytes:
        if self._is_local and (num_bytes := check_is_regular(full)) and end is None:
            _check_length(full, num_bytes)
        # Of an empty object S3 has no range.
        span = {} if (start, end) == (0, None) else {"start": start, "end": end}
        return bytes(self._file_system.cat_file(full, **span))

    def forget_cached(self, path: str) -> None:
        """Have what is read of a file next come from the disk, or the server, and not from this machine."""
        if self._is_local:
            with open_regular(Path(self._full(path))) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def local_path(self, path: str) -> Path | None:
        """Return where a file is on this machine, None if it is elsewhere."""
        return Path(self._full(path)) if self._is_local else None

    def exists(self, path: str) -> bool:
        """Return whether a file is there."""
        return self._is_there(self._full(path))

    def _is_there(self, full: str) -> bool:
        # Not fsspec's exists: it takes every failure for absence, and absence means "may be deleted".
        try:
            self._info(full)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _info(self, full: str) -> dict[str, Any]:
        found: dict[str, Any] = self._small(f"look at {full}", "_look", full)
        return found

    def _look(self, full: str) -> dict[str, Any]:
        self._file_system.invalidate_cache()  # of listings: other nodes write here too
        return dict(self._file_system.info(full))

    def version(self, path: str) -> str:
        """Return what changes when a file is written again, as far as storage tells it."""
        return repr([*map(self._info(self._full(path)).get, _OF_VERSIONS)])

    def names(self) -> list[str]:
        """Return the names of what is in the persist directory, none if it is not there."""
        return self._names_in(self._root)

    def iterations(self) -> list[int]:
        """Return the iterations that have a directory, newest first, with or without a manifest."""
        names = [name for name in self.names() if _ITERATION.fullmatch(name)]
        if self._is_local:
            # At once where this process may wait: it is no further operation there.
            apart = partial(self.aside, "look", links_in)
            links = (apart if self._works_apart else links_in)(self._root, names)
            for each in links:
                _tell_of_link(f"{self.url}/{each}")
            names = [name for name in names if name not in links]
        return sorted((int(name.removeprefix("iter_")) for name in names), reverse=True)

    def _listed(self, full: str, has_sizes: bool) -> list[Any]:
        self._file_system.invalidate_cache()
        return list(self._file_system.ls(full, detail=has_sizes))

    def names_in(self, directory: str) -> list[str]:
        """Return the names of what is in a directory, none if it is not there."""
        return self._names_in(self._full(directory))

    def _names_in(self, full: str) -> list[str]:
        return (
            [_last_part(entry) for entry in self._small(f"list {full}", "_listed", full, False)]
            if self._is_there(full)
            else []
        )

    def sizes_in(self, directory: str) -> dict[str, int]:
        """Return the sizes of plain files in a directory by name, from one listing; none if it is not there.

        Raises:
            OSError: if storage fails; never FileNotFoundError, which would speak of a file.
        """
        full = self._full(directory)
        if not self._is_there(full):
            return {}
        try:
            entries = self._small(f"list {full}", "_listed", full, True)
        except FileNotFoundError as error:
            raise OSError(f"{self.url}/{directory} changed while it was listed: {error}") from error
        files = (each for each in entries if each["type"] == "file" and each["size"] is not None)
        return {_last_part(entry["name"]): int(entry["size"]) for entry in files}

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return int(self._info(self._full(path))["size"])

    def index(self, path: str) -> Index:
        """Return a rank's index."""
        return decode(self.read(path), Index, f"{self.url}/{path}")

    def remove_directory(self, path: str) -> None:
        """Remove a directory if it is empty."""
        with suppress(OSError):
            self._file_system.rmdir(self._full(path))

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        with suppress(FileNotFoundError):
            self._small(f"remove {path}", "_remove", self._full(path))

    def _remove(self, full: str) -> None:
        if self._is_local:
            remove_here(self._root, full)
        else:
            self._file_system.rm_file(full)


def _open(url: str) -> tuple[Any, str]:
    """Return what reads and writes a directory, and the directory's path in it; may need the network.

    A package of fsspec opens object stores, too, where obstore is not installed, or where the configuration
    of fsspec has options that obstore has no counterpart for.
    """
    protocol, _, place = url.partition("://")
    if find_spec("obstore") is not None:
        from moe_ft.files.object_store import open_store

        store = open_store(protocol, place.strip("/"), fsspec.config.conf)
        if store is not None:
            return store, place.strip("/")
    file_system, root = fsspec.core.url_to_fs(url)
    return file_system, root


def call_on(url: str, method: str, *arguments: Any) -> Any:
    """Return what a method of a persist directory returns."""
    return getattr(Storage(url), method)(*arguments)


@looks_again(errno.EEXIST)  # as of one that did not look like a directory just then
def _make_directory(file_system: Any, path: str) -> None:
    file_system.makedirs(path, exist_ok=True)


def links_in(root: str, names: list[str]) -> list[str]:
    """Return those that are links: they may lead to where nothing of this directory is to be changed."""
    return [name for name in names if os.path.islink(f"{root}/{name}")]


@cache
def _tell_of_link(path: str) -> None:
    """Say once that state is not used, which this process may not notice otherwise."""
    warn(f"{path} is a symbolic link, and not used: replace it by what it leads to")


def _check_length(path: str, num_bytes: int) -> None:
    if num_bytes > MOST_JSON_BYTES:
        raise CorruptStateError(
            f"{path} has {num_bytes} bytes, and no file of its kind has more than {MOST_JSON_BYTES}"
        )


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
