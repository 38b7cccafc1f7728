"""State that dead processes have left: what is intact, and what a start must recover, by own rules.

It shares the decoding of indexes and manifests with the product, and nothing else.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest

Family = tuple[
    int, int, int, str
]  # number of the start, iteration, minus the window, name of the start


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """State that is left of a job.

    Attributes:
        intact: iterations and their families of which every rank has an intact copy, best first.
        has_any: whether there is anything that looks like state, intact or not.
    """

    intact: tuple[Family, ...]
    has_any: bool

    @property
    def newest(self) -> int | None:
        """Iteration that the next start must recover at least, None if nothing is whole."""
        return self.intact[0][1] if self.intact else None


def look(root: Path, world_size: int, nodes: Collection[str]) -> Left:
    """Return what is left below a root on storage and in the memory of the nodes that have ranks."""
    holders: dict[Family, set[int]] = defaultdict(set)
    for family, rank in (*_in_memory(root / "memory", nodes), *_on_storage(root / "storage")):
        holders[family].add(rank)
    intact = sorted(
        (each for each, ranks in holders.items() if len(ranks) == world_size), reverse=True
    )
    return Left(intact=tuple(intact), has_any=has_any(root))


def has_any(root: Path) -> bool:
    """Return whether anything below a root looks like state."""
    memory = (root / "memory").glob("*/*/*/region_*.json")
    storage = (root / "storage").glob("iter_*/*manifest*.json")
    return any(memory) or any(storage)


def states_of_several_iterations(root: Path) -> list[str]:
    """Return the checkpoints on storage whose units are not all of their iteration."""
    found = []
    for path in sorted((root / "storage").glob("iter_*/manifest*.json")):
        try:
            manifest = decode(path.read_bytes(), Manifest, str(path))
        except CorruptStateError:
            continue
        iterations = {unit.iteration for unit in manifest.units.values()}
        if manifest.window > 1 or iterations != {manifest.iteration}:
            found.append(f"{path.parent.name} with units of iterations {sorted(iterations)}")
    return found


def _in_memory(folder: Path, nodes: Collection[str]) -> Iterator[tuple[Family, int]]:
    for path in folder.glob("*/*/*/region_*.json"):
        index = _index(path) if path.parents[1].name in nodes else None
        if index is not None and index.is_whole and _is_intact(index, path.parent, path.parent):
            yield _family(index), index.rank


def _on_storage(folder: Path) -> Iterator[tuple[Family, int]]:
    for path in folder.glob("iter_*/manifest*.json"):
        try:
            manifest = decode(path.read_bytes(), Manifest, str(path))
        except CorruptStateError:
            continue
        for file in manifest.files:
            index = _index(folder / file.index)
            where = (folder / file.index).parent
            if index is not None and _is_intact(index, where, folder):
                yield _family(index), index.rank


def _family(body: Index) -> Family:
    start = body.identity.start
    return start.number, body.iteration, -body.window, start.name


def _index(path: Path) -> Index | None:
    try:
        return decode(path.read_bytes(), Index, str(path))
    except (CorruptStateError, OSError):
        return None


def _is_intact(index: Index, folder: Path, root: Path) -> bool:
    """Return whether all bytes that an index names are as it says.

    Args:
        folder: of the index and its own file.
        root: that the paths of other files are relative to.
    """
    own = folder / index.file
    contents = {"": own.read_bytes() if own.is_file() else b""}
    if len(contents[""]) < index.file_bytes:
        return False  # the product does not look into a file that has been cut
    header = contents[""][: index.header_bytes]
    if xxhash.xxh3_64_hexdigest(header) != index.header_checksum:
        return False
    for _, unit in index.entries():
        if unit.file not in contents:
            path = root / unit.file
            contents[unit.file] = path.read_bytes() if path.is_file() else b""
        part = contents[unit.file][unit.offset : unit.offset + unit.num_bytes]
        if xxhash.xxh3_64_hexdigest(part) != unit.checksum:
            return False
    return True
