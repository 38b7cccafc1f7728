"""Manifests on storage: finding, reading and writing what makes the files of an iteration a checkpoint.

An iteration may be a checkpoint of several runs, where a run was begun in a directory that holds another's:
the first has manifest.json, a later one manifest_LINEAGE.json, so that none ever replaces another run's.
Files themselves are files/storage.py, what is deleted engine/persist/retention.py.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator
from functools import partial

from moe_ft.engine.persist.soundness import check_manifest
from moe_ft.errors import CorruptStateError
from moe_ft.files.back_ends import call_at_once
from moe_ft.files.storage import Storage, iteration_directory, iteration_of, rank_path
from moe_ft.format.encoding import FORMAT, checksum, decode, encode
from moe_ft.format.entries import FileEntry
from moe_ft.format.index import IndexSummary
from moe_ft.format.manifest import MANIFEST_NAME, Manifest, UnitSource

_NAME = re.compile(r"manifest(_[A-Za-z0-9_-]+)?\.json")
_NUM_READERS = 32
_FEW = 8  # files, each of which may be looked for


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


def find_checkpoint(storage: Storage, index: str) -> Manifest:
    """Return the checkpoint in which rank 0 has this index; raises FileNotFoundError if there is none."""
    for _, _, found in checkpoints(storage, [iteration_of(index)]):
        if isinstance(found, Manifest) and found.files[0].index == index:
            return found
    raise FileNotFoundError(f"no manifest names {storage.url}/{index}")


def manifests(storage: Storage) -> Iterator[Found]:
    """Yield all manifests, newest first; raises OSError if storage fails: nobody knows what is there."""
    for iteration, path, found in checkpoints(storage):
        if isinstance(found, Manifest | CorruptStateError):
            yield iteration, path, found
        elif found is not None:
            raise found


def missing_indexes(storage: Storage, iteration: int, tag: str, ranks: Collection[int]) -> set[int]:
    """Return ranks whose index of an iteration is not there; raises OSError if storage fails."""
    paths = {rank: rank_path(iteration, rank, tag, "json") for rank in ranks}
    # One listing for all: each look takes milliseconds in an object store, or a parallel file system.
    there = set(storage.names_in(iteration_directory(iteration)))
    missing = {rank for rank, path in paths.items() if path.rpartition("/")[2] not in there}
    if len(missing) > _FEW:
        return missing
    return {rank for rank in missing if not storage.exists(paths[rank])}  # a store may list late


def write_manifest(storage: Storage, iteration: int, tag: str, world_size: int) -> Manifest:
    """Make the files of all ranks a checkpoint; raises CorruptStateError if they are not of one state."""
    files: list[FileEntry] = []
    older: dict[str, FileEntry] = {}
    positions: dict[str, int] = {}  # among all files, of older ones
    found: dict[str, tuple[int, str, list[int]]] = {}
    first: IndexSummary | None = None
    paths = [rank_path(iteration, rank, tag, "json") for rank in range(world_size)]
    contents = call_at_once((partial(storage.read, path) for path in paths), _NUM_READERS)
    for rank, (path, content) in enumerate(zip(paths, contents, strict=True)):
        index = decode(content, IndexSummary, f"{storage.url}/{path}")
        first = first or index
        is_of_state = (index.rank, index.iteration) == (rank, iteration) and index.is_whole
        if not is_of_state or (index.identity, index.window) != (first.identity, first.window):
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
        for entry in index.older:
            older[entry.data] = entry
            positions.setdefault(entry.data, world_size + len(positions))
        for name, unit in index.units.items():
            if unit.file and unit.file not in positions:
                raise CorruptStateError(f"{path}: unit {name} is in {unit.file}, an unknown file")
            age, level, at = found.get(name, (unit.iteration, unit.level, []))
            at.append(positions[unit.file] if unit.file else rank)
            found[name] = (min(age, unit.iteration), level, at)
    assert first is not None, "a job has ranks"
    manifest = Manifest(
        format=FORMAT,
        identity=first.identity,
        iteration=iteration,
        created_s=time.time(),  # for people
        files=tuple(files),
        units={
            name: UnitSource(iteration=age, level=level, files=tuple(at))
            for name, (age, level, at) in found.items()
        },
        older=tuple(older.values()),
        window=first.window,
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
