"""The storage tier's files, through fsspec: per-rank data and index, one manifest, retention, the lock.

    iter_%07d/rank_%05d_TAG.safetensors, rank_%05d_TAG.json    one rank's state; TAG tells incarnations apart
    iter_%07d/manifest.json                                    makes them a checkpoint; written last
    moe_ft.lock                                                which job writes here

Used by the writer process and by recovery; no torch.
"""

import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import msgspec

from moe_ft.errors import CorruptStateError
from moe_ft.formats import (
    FORMAT,
    MANIFEST_NAME,
    FileEntry,
    Identity,
    Index,
    Manifest,
    UnitSource,
    check_path,
    checksum,
    decode,
    encode,
)

LOCK_NAME = "moe_ft.lock"
LOCK_STALE_S = 30.0  # three renewals
_ITERATION = re.compile(r"iter_(\d{7,})")
_OUR_FILE = re.compile(r"rank_\d{5,}_[0-9a-f]{8}\.(safetensors|json)(\.part)?|manifest\.json\.part")
_CHUNK_BYTES = 16 << 20


class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which job writes to a persist directory, and when it last said so (seconds since 1970)."""

    job_id: str
    lineage: str
    host: str
    heartbeat_s: float


def file_tag(identity: Identity, *, is_last: bool = False) -> str:
    """Return what tells the files of one incarnation of one run from all others.

    Args:
        identity: of the writer.
        is_last: whether training has ended: a last checkpoint may be one of an iteration that has one
            already, and does not overwrite its files.
    """
    end = " end" if is_last else ""
    return checksum(f"{identity.lineage} {identity.history} {identity.start}{end}".encode())[:8]


def iteration_directory(iteration: int) -> str:
    """Return the directory of a checkpoint, relative to the persist directory."""
    return f"iter_{iteration:07d}"


def rank_path(iteration: int, rank: int, tag: str, suffix: str) -> str:
    """Return the path of one rank's file of a checkpoint."""
    return f"{iteration_directory(iteration)}/rank_{rank:05d}_{tag}.{suffix}"


class Storage:
    """One persist directory. Paths are relative to it; all methods raise OSError when it fails."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._file_system, self._root = fsspec.core.url_to_fs(url)
        self._is_local = "file" in _protocols(self._file_system)

    def _full(self, path: str) -> str:
        check_path(path, "a path on storage")
        return f"{self._root.rstrip('/')}/{path}"

    def make_root(self) -> None:
        """Create the persist directory."""
        self._file_system.makedirs(self._root, exist_ok=True)

    def write(self, path: str, pieces: Iterable[memoryview]) -> None:
        """Write a large file; on a local file system it is on the disk when this returns."""
        full = self._full(path)
        self._file_system.makedirs(full.rpartition("/")[0], exist_ok=True)
        with self._file_system.open(full, "wb") as file:
            for content in pieces:
                for start in range(0, len(content), _CHUNK_BYTES):
                    file.write(content[start : start + _CHUNK_BYTES])
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())

    def write_atomically(self, path: str, content: bytes) -> None:
        """Write a small file so that readers see all of it or nothing."""
        full = self._full(path)
        self._file_system.makedirs(full.rpartition("/")[0], exist_ok=True)
        if not self._is_local:  # object stores show an object only when it is complete
            self._file_system.pipe_file(full, content)
            return
        self.write(f"{path}.part", [memoryview(content)])
        os.replace(f"{full}.part", full)
        descriptor = os.open(os.path.dirname(full), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: str, offset: int = 0, num_bytes: int = -1) -> bytes:
        """Return a file, or a range of it."""
        end = None if num_bytes < 0 else offset + num_bytes
        return bytes(self._file_system.cat_file(self._full(path), start=offset, end=end))

    def local_path(self, path: str) -> Path | None:
        """Return where a file is on this machine, None if it is elsewhere."""
        return Path(self._full(path)) if self._is_local else None

    def exists(self, path: str) -> bool:
        """Return whether a file is there."""
        return self._is_there(self._full(path))

    def _is_there(self, full: str) -> bool:
        # Not fsspec's exists: it takes every failure for absence, and absence means "may be deleted".
        try:
            self._file_system.info(full)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def iterations(self) -> list[int]:
        """Return the iterations that have a directory, newest first, with or without a manifest."""
        self._file_system.invalidate_cache()
        if not self._is_there(self._root):
            return []
        names = (entry.rstrip("/").rpartition("/")[2] for entry in self._list(self._root))
        matches = (_ITERATION.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def _list(self, full: str) -> list[str]:
        return list(self._file_system.ls(full, detail=False))

    def has_manifest(self, iteration: int) -> bool:
        """Return whether a manifest says that the iteration's files are a checkpoint."""
        return self.exists(f"{iteration_directory(iteration)}/{MANIFEST_NAME}")

    def manifest(self, iteration: int) -> Manifest:
        """Return a checkpoint's manifest.

        Raises:
            CorruptStateError: if it is corrupt.
            OSError: if it is not there.
        """
        path = f"{iteration_directory(iteration)}/{MANIFEST_NAME}"
        return decode(self.read(path), Manifest, f"{self.url}/{path}")

    def index(self, path: str) -> Index:
        """Return a rank's index."""
        return decode(self.read(path), Index, f"{self.url}/{path}")

    def write_manifest(self, iteration: int, tag: str, world_size: int) -> Manifest:
        """Make the files of all ranks a checkpoint; every rank's index must be there.

        Raises:
            CorruptStateError: if the indexes do not belong together.
        """
        files: list[FileEntry] = []
        older: dict[str, FileEntry] = {}
        indexes: list[Index] = []
        identity, window = None, 0
        for rank in range(world_size):
            path = rank_path(iteration, rank, tag, "json")
            content = self.read(path)
            index = decode(content, Index, f"{self.url}/{path}")
            identity = identity or index.identity
            window = window or index.window
            found = (index.rank, index.iteration, index.identity, index.window)
            if found != (rank, iteration, identity, window) or not index.is_whole:
                raise CorruptStateError(f"{self.url}/{path} does not belong to this checkpoint")
            files.append(
                FileEntry(
                    rank=rank,
                    index=path,
                    index_checksum=checksum(content),
                    data=rank_path(iteration, rank, tag, "safetensors"),
                    num_bytes=index.file_bytes,
                )
            )
            older.update({entry.data: entry for entry in index.older})
            indexes.append(index)
        assert identity is not None
        manifest = Manifest(
            format=FORMAT,
            identity=identity,
            iteration=iteration,
            created_s=time.time(),
            files=tuple(files),
            units=_sources(indexes, files, list(older)),
            older=tuple(older.values()),
            window=window,
        )
        path = f"{iteration_directory(iteration)}/{MANIFEST_NAME}"
        self.write_atomically(path, encode(manifest))
        return manifest

    def retain(self, newest: Manifest, keep: int) -> list[int]:
        """Delete what the newest ``keep`` checkpoints of a run do not need; return their iterations.

        A checkpoint is unmade by removing its manifest first. Checkpoints of other lineages, and
        whatever is not named like a file of moe_ft, stay; only a checkpoint of the same iteration has
        been replaced by the newest.

        Args:
            newest: the checkpoint that was just written.
            keep: how many checkpoints to keep, at least 1.
        """
        live: list[Manifest] = [newest]
        dead: list[Manifest] = []
        for iteration in self.iterations():
            # Newer ones are there after a recovery from an old one: they stay until the run passes them.
            manifest = None if iteration >= newest.iteration else self._readable(iteration)
            if manifest is not None and manifest.identity.lineage == newest.identity.lineage:
                (live if len(live) < keep else dead).append(manifest)
        for manifest in dead:
            self.remove(f"{iteration_directory(manifest.iteration)}/{MANIFEST_NAME}")
        needed = self._needed()
        for iteration in self.iterations():
            # Files without a manifest may still become a checkpoint if they are newer.
            if iteration <= newest.iteration and not self._is_foreign(iteration, live):
                self._remove_unneeded(iteration, needed)
        return [manifest.iteration for manifest in dead]

    def _readable(self, iteration: int) -> Manifest | None:
        """Return a manifest, None if there is none or it is corrupt: evidence, and not ours to delete."""
        if not self.has_manifest(iteration):
            return None
        try:
            return self.manifest(iteration)
        except CorruptStateError:
            return None

    def _needed(self) -> set[str]:
        """Return the files that any manifest names, of whichever run."""
        manifests = (self._readable(iteration) for iteration in self.iterations())
        files = [
            file
            for manifest in manifests
            if manifest
            for file in (*manifest.files, *manifest.older)
        ]
        return {path for file in files for path in (file.index, file.data)}

    def _is_foreign(self, iteration: int, live: Iterable[Manifest]) -> bool:
        is_live = any(manifest.iteration == iteration for manifest in live)
        return self.has_manifest(iteration) and not is_live

    def _remove_unneeded(self, iteration: int, needed: set[str]) -> None:
        directory = self._full(iteration_directory(iteration))
        for entry in self._list(directory):
            name = entry.rpartition("/")[2]
            path = f"{iteration_directory(iteration)}/{name}"
            if _OUR_FILE.fullmatch(name) and path not in needed:
                self.remove(path)
        with suppress(OSError):
            self._file_system.rmdir(directory)  # only if it is empty

    def remove_incomplete(self, before: int) -> None:
        """Remove files of older iterations that never became a checkpoint.

        Call it when no older checkpoint can become complete any more; it makes room on a full disk.
        """
        needed = self._needed()
        for iteration in self.iterations():
            if iteration < before and not self.has_manifest(iteration):
                self._remove_unneeded(iteration, needed)

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        with suppress(FileNotFoundError):
            self._file_system.rm_file(self._full(path))

    def lock(self) -> Lock | None:
        """Return the lock, None if there is none that can be read."""
        try:
            return msgspec.json.decode(self.read(LOCK_NAME), type=Lock)
        except (OSError, msgspec.MsgspecError):
            return None

    def write_lock(self, job_id: str, lineage: str, host: str) -> None:
        """Take the lock, or renew it."""
        lock = Lock(job_id=job_id, lineage=lineage, host=host, heartbeat_s=time.time())
        self.write_atomically(LOCK_NAME, msgspec.json.encode(lock))

    def release_lock(self, job_id: str) -> None:
        """Remove the lock if it is this job's."""
        lock = self.lock()
        if lock is not None and lock.job_id == job_id:
            self.remove(LOCK_NAME)


def _sources(
    indexes: Sequence[Index], files: Sequence[FileEntry], older: Sequence[str]
) -> dict[str, UnitSource]:
    """Return where a checkpoint finds its units, from the indexes of all ranks."""
    position_of = {file.data: position for position, file in enumerate(files)}
    position_of.update({path: len(files) + position for position, path in enumerate(older)})
    found: dict[str, tuple[int, str, list[int]]] = {}
    for index, own in zip(indexes, files, strict=True):
        for name, unit in index.units.items():
            iteration, level, positions = found.get(name, (unit.iteration, unit.level, []))
            path = unit.file or own.data
            if path not in position_of:
                raise CorruptStateError(f"{own.index}: unit {name} is in {path}, an unknown file")
            positions.append(position_of[path])
            found[name] = (min(iteration, unit.iteration), level, positions)
    return {
        name: UnitSource(iteration=iteration, level=level, files=tuple(positions))
        for name, (iteration, level, positions) in found.items()
    }


def _protocols(file_system: Any) -> tuple[str, ...]:
    protocol = file_system.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
