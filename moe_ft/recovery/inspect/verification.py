"""Checks of everything below a directory, down to the last byte that a checksum covers: `verify`.

engine/persist/soundness.py decides whether a checkpoint is sound, as it does for a recovery; here all data is
read too. holdings.py finds what there is to check.
"""

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from moe_ft.engine.persist.soundness import (
    check_is_finite,
    check_references,
    check_region,
    read_file,
)
from moe_ft.errors import CorruptStateError
from moe_ft.files.private_files import open_private, open_regular, read_private
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index, check_places, check_units
from moe_ft.format.manifest import Manifest
from moe_ft.recovery.inspect.boundary_logs import verify_logs
from moe_ft.recovery.inspect.holdings import Holding, find_holdings

Open = Callable[[Path], BinaryIO]


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
    index = decode(read_private(path), Index, str(path))
    check_region(index, path)
    _check_file(path.parent / index.file, index, open_private)
    for pool in {unit.file for unit in index.units.values() if unit.file}:
        _check_pool(path.parent / pool, index)


def _check_file(data: Path, index: Index, open_: Open = open_regular) -> None:
    """Check a local data file against its index, and that it is a valid safetensors file."""
    if data.stat().st_size != index.file_bytes:
        raise CorruptStateError(f"{data} has {data.stat().st_size} bytes, not {index.file_bytes}")
    content = _mapped(data, open_)
    check_units(index, {"": content}, str(data))
    _check_numbers(index, "", content)
    _check_is_valid(data)


def _check_pool(path: Path, index: Index) -> None:
    """Check the units that an index has in a pool."""
    content = _mapped(path, open_private)
    pooled = [(name, unit) for name, unit in index.units.items() if unit.file == path.name]
    check_places({path.name: content}, str(path), pooled)
    _check_numbers(index, path.name, content)
    _check_is_valid(path)


def _mapped(path: Path, open_: Open) -> memoryview:
    """Return the bytes of a file; the garbage collector unmaps it, since a traceback may hold parts."""
    with open_(path) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _check_is_valid(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy") as opened:
            opened.keys()
    except SafetensorError as error:
        raise CorruptStateError(f"{path} is not a valid safetensors file: {error}") from error


def _check_numbers(index: Index, file: str, content: memoryview) -> None:
    for name, unit in index.entries():
        if unit.file == file:
            check_is_finite(name, unit, content[unit.offset : unit.offset + unit.num_bytes])


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
    local = storage.local_path(path)
    if local is not None:
        _check_file(local, index)
        return
    content = memoryview(storage.read(path))
    check_units(index, {"": content}, path)
    _check_numbers(index, "", content)
