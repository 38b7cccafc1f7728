"""Checkpoints on storage as the writer makes them, for tests of what is written and what is deleted."""

from pathlib import Path

import pytest

from moe_ft.engine.persist.manifests import find_manifests, read_manifest
from moe_ft.engine.persist.retention import Retention
from moe_ft.files.storage import Storage, iteration_directory
from moe_ft.format.encoding import checksum
from moe_ft.format.identity import Identity
from moe_ft.format.index import check_units
from moe_ft.format.manifest import MANIFEST_NAME, Manifest
from tests.unit.moe_ft.builders import persist_checkpoint

# Of tests that touch files without the storage.
LOCAL = pytest.mark.parametrize("storage", ["local"], indirect=True)
FAULTY = pytest.mark.parametrize(
    "storage", ["local", "objects"], indirect=True
)  # can be told to fail


def save(storage: Storage, iteration: int, identity: Identity, keep: int) -> Manifest:
    """Do all that one checkpoint takes, as the writer process does."""
    manifest = persist_checkpoint(storage, iteration, identity)
    Retention(storage, keep).retain(manifest)
    return manifest


def names(storage: Storage, iteration: int) -> set[str]:
    """Return what is in the directory of an iteration."""
    directory = Path(storage.url) / iteration_directory(iteration)
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


def manifest_path(iteration: int) -> str:
    """Return where the manifest of the first run in a directory is."""
    return f"{iteration_directory(iteration)}/{MANIFEST_NAME}"


def complete_iterations(storage: Storage) -> list[int]:
    """Return the iterations that have a manifest, after reading all that their manifests name.

    Raises:
        OSError: if something that a manifest names is missing, corrupt or of another state.
    """
    complete = []
    for iteration in storage.iterations():
        if not (paths := find_manifests(storage, iteration)):
            continue
        for manifest in [read_manifest(storage, path) for path in paths]:
            _check_all(storage, manifest)
        complete.append(iteration)
    return complete


def _check_all(storage: Storage, manifest: Manifest) -> None:
    assert [file.rank for file in manifest.files] == list(range(manifest.identity.world_size))
    for file in (*manifest.files, *manifest.older):
        assert checksum(storage.read(file.index)) == file.index_checksum
        content = storage.read(file.data)
        assert len(content) == file.num_bytes
        check_units(storage.index(file.index), {"": memoryview(content)}, file.data)
