"""Checkpoints on storage as the writer makes them, for tests of what is written and what is deleted."""

from pathlib import Path

from moe_ft.engine.retention import Retention
from moe_ft.engine.storage import Storage, iteration_directory
from moe_ft.format.identity import Identity
from moe_ft.format.manifest import MANIFEST_NAME, Manifest
from tests.unit.moe_ft.builders import persist_checkpoint


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
