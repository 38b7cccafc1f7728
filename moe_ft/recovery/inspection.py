"""What is in a directory of checkpoints, and whether every byte of it is right: `inspect` and `verify`.

Reads persist directories, one checkpoint of them, and memory directories (of all jobs, a job or a node).
"""

import mmap
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open
from tabulate import tabulate

from moe_ft.engine.checks import check_places, check_units
from moe_ft.engine.regions import INDEX_NAME
from moe_ft.engine.storage import Storage
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.formats import Identity, Index, UnitEntry, checksum, decode, lossy_packings
from moe_ft.packings import Packing
from moe_ft.recovery.expert_summary import render_experts, summarize_experts
from moe_ft.units import parse_unit

_ITERATION_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """State of one iteration in one place.

    Attributes:
        tier: "memory", "replica" or "storage".
        place: where, for people.
        ranks: whose state it is.
        problem: why it cannot be used, empty if nothing is known to be wrong.
        window, num_snapshots: how many snapshots together hold everything, and how many there are.
    """

    tier: str
    place: str
    iteration: int
    identity: Identity | None
    ranks: tuple[int, ...]
    num_bytes: int
    units: dict[str, tuple[int, str, int]]  # iteration, level, bytes
    indexes: tuple[Index, ...] = ()
    problem: str = ""
    window: int = 1
    num_snapshots: int = 1


def find_holdings(directory: str) -> list[Holding]:
    """Return everything that looks like state of moe_ft below a directory or fsspec URL.

    Raises:
        ConfigError: if there is nothing.
    """
    holdings = [*_in_storage(directory), *_in_memory(directory)]
    if not holdings:
        raise ConfigError(
            f"{directory} holds no state of moe_ft: no iter_*/manifest.json and no region_*.json. Give "
            "a persist directory, one of its iter_* directories, or a memory directory."
        )
    return holdings


def _storage_of(directory: str) -> tuple[Storage, int | None]:
    """Return the persist directory, and the iteration if one of its checkpoints was named."""
    parent, _, name = directory.rstrip("/").rpartition("/")
    match = _ITERATION_NAME.fullmatch(name)
    return (Storage(parent or "."), int(match[1])) if match else (Storage(directory), None)


def _in_storage(directory: str) -> Iterator[Holding]:
    storage, only = _storage_of(directory)
    try:
        iterations = storage.iterations()
    except NotADirectoryError:
        return
    for iteration in iterations:
        if only not in (None, iteration):
            continue
        place = f"{storage.url}/iter_{iteration:07d}"
        if not storage.has_manifest(iteration):
            yield _broken("storage", place, iteration, "incomplete: it has no manifest")
            continue
        try:
            manifest = storage.manifest(iteration)
            indexes = [storage.index(file.index) for file in manifest.files]
        except OSError as error:
            yield _broken("storage", place, iteration, f"corrupt: {error}")
            continue
        sizes: Counter[str] = Counter()
        for index in indexes:
            sizes.update({name: unit.num_bytes for name, unit in index.units.items()})
        yield Holding(
            tier="storage",
            place=place,
            iteration=iteration,
            identity=manifest.identity,
            ranks=tuple(file.rank for file in manifest.files),
            num_bytes=sum(file.num_bytes for file in manifest.files),
            units={
                name: (source.iteration, source.level, sizes[name])
                for name, source in manifest.units.items()
            },
            indexes=tuple(indexes),
            window=manifest.window,
            num_snapshots=manifest.window,
        )


def _in_memory(directory: str) -> Iterator[Holding]:
    root = Path(directory)
    if not root.is_dir():
        return
    for path in sorted(root.rglob("region_*.json")):
        if not INDEX_NAME.fullmatch(path.name):
            continue
        tier = "replica" if path.parent.name.startswith("replica_") else "memory"
        try:
            index = decode(path.read_bytes(), Index, str(path))
        except OSError as error:
            yield _broken(tier, str(path), 0, f"corrupt: {error}")
            continue
        yield Holding(
            tier=tier,
            place=str(path),
            iteration=index.iteration,
            identity=index.identity,
            ranks=(index.rank,),
            num_bytes=index.file_bytes,
            units={
                name: (unit.iteration, unit.level, unit.num_bytes)
                for name, unit in index.units.items()
            },
            indexes=(index,),
            window=index.window,
            num_snapshots=index.num_snapshots,
        )


def _broken(tier: str, place: str, iteration: int, problem: str) -> Holding:
    return Holding(
        tier=tier,
        place=place,
        iteration=iteration,
        identity=None,
        ranks=(),
        num_bytes=0,
        units={},
        problem=problem,
    )


def render_holdings(holdings: list[Holding], *, lists_units: bool) -> str:
    """Return tables: what there is, the newest state's contents, and the settings it was made with."""
    rows = [
        (
            each.iteration if not each.problem else "-",
            each.tier,
            _ranks(each.ranks),
            len(each.units),
            f"{each.num_bytes / 2**20:.1f}",
            f"{each.num_snapshots} of {each.window}" if each.identity else "-",
            each.identity.history[-1][0] if each.identity else "-",
            each.identity.lineage if each.identity else "-",
            each.problem or each.place,
        )
        for each in sorted(holdings, key=lambda each: (-each.iteration, each.tier, each.place))
    ]
    headers = (
        "iteration",
        "tier",
        "ranks",
        "units",
        "MiB",
        "snapshots",
        "incarnation",
        "lineage",
        "where",
    )
    text = tabulate(rows, headers=headers, disable_numparse=True)
    usable = [each for each in holdings if each.identity is not None]
    if not usable:
        return text
    newest = max(usable, key=_usability)
    parts = [
        each
        for each in usable
        if (each.iteration, each.tier, each.window, each.num_snapshots)
        == (newest.iteration, newest.tier, newest.window, newest.num_snapshots)
    ]
    return f"{text}\n\n{_describe(newest, parts, lists_units=lists_units)}"


def _usability(holding: Holding) -> tuple[bool, str, int]:
    """Order what a recovery would rather use last."""
    lineage = holding.identity.lineage if holding.identity else ""
    return holding.num_snapshots == holding.window, lineage, holding.iteration


def _ranks(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{min(ranks)}-{max(ranks)}"


def _describe(newest: Holding, parts: list[Holding], *, lists_units: bool) -> str:
    identity = newest.identity
    assert identity is not None
    units: dict[str, tuple[int, str, int]] = {}
    for part in parts:
        for name, (iteration, level, num_bytes) in part.units.items():
            units[name] = (iteration, level, num_bytes + units.get(name, (0, "", 0))[2])
    ordered = sorted(units, key=parse_unit)
    if lists_units:
        table = [(name, *units[name]) for name in ordered]
        contents = tabulate(table, headers=("unit", "iteration", "level", "bytes"))
    else:
        kinds = Counter(parse_unit(name).kind.value for name in ordered)
        sizes: Counter[str] = Counter()
        for name in ordered:
            sizes[parse_unit(name).kind.value] += units[name][2]
        table_ = [(kind, count, f"{sizes[kind] / 2**20:.2f}") for kind, count in kinds.items()]
        contents = tabulate(table_, headers=("kind of unit", "units", "MiB"), disable_numparse=True)
    history = ", ".join(f"{number} from iteration {start}" for number, start in identity.history)
    experts = summarize_experts(index for part in parts for index in part.indexes)
    settings = [
        (flag, value) for flag, value in sorted(identity.fingerprint.items()) if value is not None
    ]
    return "\n\n".join(
        (
            f"iteration {newest.iteration}, {newest.tier}: job {identity.job_id}, strategy "
            f"{identity.strategy}, {identity.world_size} ranks, incarnations {history}",
            *([_describe_window(newest)] if newest.window > 1 else []),
            *_describe_packings(parts),
            contents,
            *([render_experts(experts)] if experts else []),
            tabulate(settings, headers=("setting", "value"), disable_numparse=True),
        )
    )


def _describe_packings(parts: list[Holding]) -> list[str]:
    """Say which state is kept otherwise than it is; nothing where all of it is exact."""
    entries = [entry for part in parts for index in part.indexes for _, entry in index.entries()]
    lossy = lossy_packings(entries)
    if lossy:
        kept = ", ".join(f"{key} as {packing}" for key, packing in lossy.items())
        return [f"LOSSY: it keeps {kept}: a recovery from it is not exact"]
    if any(tensor.packing == Packing.SPLIT for entry in entries for tensor in entry.tensors):
        return ["masters are kept as BF16 weights and what these leave out: nothing is lost"]
    return []


def _describe_window(holding: Holding) -> str:
    first = holding.iteration - holding.num_snapshots + 1
    text = f"a window with {holding.num_snapshots} of {holding.window} snapshots, from iteration {first} on"
    if holding.num_snapshots < holding.window:
        return f"{text}; of no use until it is complete"
    return (
        f"{text}: a recovery puts them back one after the other, runs {holding.window - 1} iterations "
        f"again, and has all units at iteration {holding.iteration}"
    )


def verify(directory: str) -> tuple[list[str], list[str]]:
    """Read everything below a directory and check everything.

    Returns:
        What is right and what is wrong, a line each.

    Raises:
        ConfigError: if there is nothing.
    """
    right, wrong = [], []
    for holding in find_holdings(directory):
        name = f"iteration {holding.iteration} ({holding.tier}, {holding.place})"
        if holding.problem.startswith("incomplete"):
            right.append(f"{holding.place}: {holding.problem}; not a checkpoint, never used")
            continue
        try:
            if holding.problem:
                raise CorruptStateError(holding.problem)
            if holding.tier == "storage":
                _verify_checkpoint(holding)
            else:
                _verify_region(Path(holding.place))
        except OSError as error:
            wrong.append(f"{name}: {error}")
        else:
            right.append(f"{name}: {len(holding.units)} units, {holding.num_bytes} bytes")
    return right, wrong


def _verify_region(path: Path) -> None:
    index = decode(path.read_bytes(), Index, str(path))
    _verify_file(path.parent / index.file, index)


def _verify_file(data: Path, index: Index) -> None:
    """Check a local data file and the pool beside it against its index, and that they are valid."""
    if data.stat().st_size != index.file_bytes:
        raise CorruptStateError(f"{data} has {data.stat().st_size} bytes, not {index.file_bytes}")
    with (
        data.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as content,
    ):
        check_units(index, {"": content}, str(data))
    for pool in {unit.file for unit in index.units.values() if unit.file and "/" not in unit.file}:
        _verify_pool(data.parent / pool, index)
    try:
        with safe_open(data, framework="numpy") as opened:
            opened.keys()
    except SafetensorError as error:
        raise CorruptStateError(f"{data} is not a valid safetensors file: {error}") from error


def _is_in(older: Index | None, name: str, unit: UnitEntry) -> bool:
    """Return whether the file of an older checkpoint holds a unit version."""
    there = None if older is None else older.units.get(name)
    return there is not None and not there.file and there.checksum == unit.checksum


def _verify_pool(path: Path, index: Index) -> None:
    """Check the units that an index has in a pool."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping,
        memoryview(mapping) as content,
    ):
        pooled = [(name, unit) for name, unit in index.units.items() if unit.file == path.name]
        check_places({path.name: content}, str(path), pooled)
    with safe_open(path, framework="numpy") as opened:
        opened.keys()


def _verify_checkpoint(holding: Holding) -> None:
    """Check a manifest against its indexes and those against their data, rank by rank."""
    storage, _ = _storage_of(holding.place)
    manifest = storage.manifest(holding.iteration)
    indexes: dict[str, Index] = {}
    for file in (*manifest.files, *manifest.older):
        content = storage.read(file.index)
        if checksum(content) != file.index_checksum:
            raise CorruptStateError(f"{file.index} is not the index that the manifest names")
        index = decode(content, Index, file.index)
        if str(PurePosixPath(file.index).with_name(index.file)) != file.data:
            raise CorruptStateError(f"{file.index} describes another file than {file.data}")
        indexes[file.data] = index
        local = storage.local_path(file.data)
        if local is not None:
            _verify_file(local, index)
        else:
            check_units(index, {"": memoryview(storage.read(file.data))}, file.data)
    for own in manifest.files:
        for name, unit in indexes[own.data].units.items():
            if unit.file and not _is_in(indexes.get(unit.file), name, unit):
                raise CorruptStateError(f"{own.index}: unit {name} is not in {unit.file}")
    missing = set(range(manifest.identity.world_size)) - {file.rank for file in manifest.files}
    if missing:
        raise CorruptStateError(f"the state of ranks {sorted(missing)[:8]} is missing")
