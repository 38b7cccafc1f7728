"""Manifests on storage: finding, reading and writing what makes the files of an iteration a checkpoint.

An iteration may be a checkpoint of several runs, where a run was begun in a directory that holds another's:
the first has manifest.json, a later one manifest_LINEAGE.json, so that none ever replaces another run's.
Files themselves are files/storage.py, what is deleted engine/persist/retention.py.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence

from moe_ft.engine.persist.soundness import check_manifest
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, iteration_directory, rank_path
from moe_ft.format.encoding import FORMAT, checksum, decode, encode
from moe_ft.format.entries import FileEntry
from moe_ft.format.index import Index
from moe_ft.format.manifest import MANIFEST_NAME, Manifest, UnitSource

_NAME = re.compile(r"manifest(_[A-Za-z0-9_-]+)?\.json")


# Iteration, path and content of a manifest; what is corrupt as the error.
Found = tuple[int, str, Manifest | CorruptStateError]


def find_manifests(storage: Storage, iteration: int) -> list[str]:
    """Return the paths of an iteration's manifests; raises OSError if storage fails."""
    directory = iteration_directory(iteration)
    names = {name for name in storage.names_in(directory) if _NAME.fullmatch(name)}
    # A store that lists late may leave it out, and what no manifest names is deleted.
    if MANIFEST_NAME not in names and storage.exists(f"{directory}/{MANIFEST_NAME}"):
        names.add(MANIFEST_NAME)
    return [f"{directory}/{name}" for name in sorted(names)]


def read_manifest(storage: Storage, path: str) -> Manifest:
    """Return a manifest; raises CorruptStateError if it is corrupt, contradicts itself or is misplaced."""
    where = f"{storage.url}/{path}"
    manifest = decode(storage.read(path), Manifest, where)
    check_manifest(manifest, path, where)
    return manifest


def checkpoints(
    storage: Storage, iterations: Iterable[int] | None = None
) -> Iterator[tuple[int, str, Manifest | Exception | None]]:
    """Yield iteration, path and manifest of all checkpoints, newest first; what cannot be read as its error.

    A directory without a manifest has no path and no manifest. Raises OSError if storage cannot be listed.
    """
    for iteration in storage.iterations() if iterations is None else iterations:
        for path in find_manifests(storage, iteration) or [""]:
            try:
                found = read_manifest(storage, path) if path else None
            except Exception as error:  # back ends raise anything
                yield iteration, path, error
            else:
                yield iteration, path, found


def manifests(storage: Storage) -> Iterator[Found]:
    """Yield all manifests, newest first; raises OSError if storage fails: nobody knows what is there."""
    for iteration, path, found in checkpoints(storage):
        if isinstance(found, Manifest | CorruptStateError):
            yield iteration, path, found
        elif found is not None:
            raise found


def write_manifest(storage: Storage, iteration: int, tag: str, world_size: int) -> Manifest:
    """Make the files of all ranks a checkpoint; raises CorruptStateError if they are not of one state."""
    files: list[FileEntry] = []
    older: dict[str, FileEntry] = {}
    indexes: list[Index] = []
    for rank in range(world_size):
        path = rank_path(iteration, rank, tag, "json")
        content = storage.read(path)
        index = decode(content, Index, f"{storage.url}/{path}")
        first = indexes[0] if indexes else index
        found = (index.rank, index.iteration, index.identity, index.window)
        if found != (rank, iteration, first.identity, first.window) or not index.is_whole:
            raise CorruptStateError(f"{storage.url}/{path} does not belong to this checkpoint")
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
    manifest = Manifest(
        format=FORMAT,
        identity=indexes[0].identity,
        iteration=iteration,
        created_s=time.time(),  # for people
        files=tuple(files),
        units=_sources(indexes, files, list(older)),
        older=tuple(older.values()),
        window=indexes[0].window,
    )
    path = _path_for(storage, iteration, manifest.identity.lineage)
    storage.write_atomically(path, encode(manifest))
    return manifest


def _path_for(storage: Storage, iteration: int, lineage: str) -> str:
    """Return where a run's manifest goes: not where that of another run is, or one that nobody can read."""
    directory = iteration_directory(iteration)
    path = f"{directory}/{MANIFEST_NAME}"
    if not storage.exists(path):
        return path
    try:
        is_own = read_manifest(storage, path).identity.lineage == lineage
    except CorruptStateError:
        is_own = False
    return path if is_own else f"{directory}/manifest_{lineage}.json"


def _sources(
    indexes: Sequence[Index], files: Sequence[FileEntry], older: Sequence[str]
) -> dict[str, UnitSource]:
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
