"""Checks of everything below a directory, down to the last byte that a checksum covers: `verify`.

engine/persist/soundness.py decides whether a checkpoint is sound, as it does for a recovery; here all data is
read too. holdings.py finds what there is to check.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from moe_ft.engine.persist.soundness import check_references, check_region, read_file
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest
from moe_ft.recovery.inspect.boundary_logs import verify_logs
from moe_ft.recovery.inspect.holdings import Holding, find_holdings
from moe_ft.recovery.readers import MemoryReader, StorageReader


def verify(directory: str) -> tuple[list[str], list[str]]:
    """Read everything below a directory and check everything.

    Returns:
        Lines about what is right, and lines about what is wrong. Having nothing complete is also wrong.

    Raises:
        ConfigError: if there is nothing.
    """
    right, wrong, num_complete = [], [], 0
    for holding in find_holdings(directory):
        name = f"iteration {holding.iteration} ({holding.tier}, {holding.place})"
        if holding.problem.startswith("incomplete"):
            right.append(f"{holding.place}: {holding.problem}; not a checkpoint, never used")
            continue
        damage = list(_damage_of(holding))
        wrong += [f"{name}: {each}" for each in damage]
        if not damage:
            right.append(f"{name}: {len(holding.units)} units, {holding.num_bytes} bytes")
            num_complete += holding.num_snapshots == holding.window
    if not num_complete and not wrong:
        wrong.append(f"{directory} holds nothing that is complete")
    logs_right, logs_wrong = verify_logs(directory)
    return right + logs_right, wrong + logs_wrong


def _damage_of(holding: Holding) -> Iterator[str]:
    """Yield everything that is wrong with one checkpoint or region."""
    if holding.manifest is not None and holding.storage is not None:
        damage = list(_damage_of_checkpoint(holding.storage, holding.manifest))
        yield from damage or filter(None, [holding.problem])
    elif holding.problem:
        yield holding.problem
    else:
        yield from _damage(partial(_check_region, Path(holding.place)))


def _damage(check: Callable[[], None]) -> Iterator[str]:
    try:
        check()
    except (OSError, ValueError, SafetensorError) as error:  # an empty file cannot be mapped
        yield f"{error}"


def _check_region(path: Path) -> None:
    reader = MemoryReader(path, where=str(path))
    check_region(reader.index, path)
    reader.check()
    for file in {unit.file or reader.index.file for _, unit in reader.index.entries()}:
        _check_is_valid(path.parent / file)


def _check_is_valid(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy") as opened:
            opened.keys()
    except SafetensorError as error:
        raise CorruptStateError(f"{path} is not a valid safetensors file: {error}") from error


def _damage_of_checkpoint(storage: Storage, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, file by file."""
    indexes: dict[str, Index] = {}
    for file in (*manifest.files, *manifest.older):
        try:
            index = indexes[file.data] = read_file(storage, manifest, file)
        except OSError as error:
            yield f"{error}"
        else:
            yield from _damage(partial(_check_stored, storage, file.data, index))
    if len(indexes) == len({file.data for file in (*manifest.files, *manifest.older)}):
        yield from _damage(partial(check_references, manifest, indexes))


def _check_stored(storage: Storage, path: str, index: Index) -> None:
    # Units in older files are checked with those.
    units = {name: unit for name, unit in index.units.items() if not unit.file}
    own = msgspec.structs.replace(index, units=units)
    where = f"{storage.url}/{path}"
    StorageReader(storage, own, path, where, maps_local_files=True).check()
    if (local := storage.local_path(path)) is not None:
        _check_is_valid(local)
