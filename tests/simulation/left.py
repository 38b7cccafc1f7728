"""State that dead processes have left: what is intact, and what a start must recover, by own rules.

It shares the decoding of indexes and manifests with the product, and nothing else.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import xxhash

from moe_ft.engine.memory.job_directory import rank_and_holder
from moe_ft.errors import CorruptStateError
from moe_ft.format.boundary import BoundaryIndex
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest
from moe_ft.units import UnitKind, UnitPart, parse_unit
from tests.simulation.parity import is_intact, made_again
from tests.simulation.reachable import best_local, is_alive
from tests.simulation.shape import Shape

_SIZES = (
    "--pipeline-model-parallel-size",
    "--tensor-model-parallel-size",
    "--expert-model-parallel-size",
    "--use-distributed-optimizer",
)
Family = tuple[
    int, int, int, str
]  # number of the start, iteration, minus the window, name of the start


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """State that is left of a job.

    Attributes:
        intact: iterations and their families of which every rank has an intact copy, best first.
        has_any: whether there is anything that looks like state, intact or not.
        local: target of the best local recovery, and the iterations that its stages run again, all together.
        num_stages: of the job.
        has_damaged_logs: whether bits of a boundary log have changed, which may be found too late.
        experts: iterations of the versions that they come back with by layer and number, if the best state is
            one of another layout; else empty.
    """

    intact: tuple[Family, ...]
    has_any: bool
    local: tuple[int, int] | None
    num_stages: int
    has_damaged_logs: bool = False
    experts: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def newest_global(self) -> int | None:
        """Iteration that a recovery of all stages must recover at least, None if nothing is whole."""
        return self.intact[0][1] if self.intact else None

    @property
    def newest(self) -> int | None:
        """Iteration that the next start must recover at least, None if no state can be reached."""
        found = [self.newest_global, None if self.local is None else self.local[0]]
        return max((each for each in found if each is not None), default=None)

    @property
    def num_replays(self) -> int:
        """Iterations that all stages together run again to reach the newest state, at least."""
        costs = [
            self.num_stages * (-window - 1)
            for _, at, window, _ in self.intact[:1]
            if at == self.newest
        ]
        if self.local is not None and self.local[0] == self.newest:
            costs.append(self.local[1])
        return min(costs)

    def has_ended(self, error: BaseException | None) -> bool:
        """Return whether a log of another node has ended a replay: the next start recovers all stages."""
        is_of_log = isinstance(error, CorruptStateError) and "boundary_" in str(error)
        return self.has_damaged_logs and is_of_log


def look(root: Path, shape: Shape, nodes: Collection[str], *, is_local: bool = False) -> Left:
    """Return what is left below a root on storage and in the memory of the nodes that have ranks.

    Args:
        is_local: whether stages may recover alone.
    """
    holders: dict[Family, set[int]] = defaultdict(set)
    writers: dict[Family, Index] = {}
    indexes = [*_in_memory(root / "memory", nodes), *_on_storage(root / "storage")]
    indexes += _from_parity(root / "memory", nodes)
    for index in indexes:
        holders[_family(index)].add(index.rank)
        writers[_family(index)] = index
    intact = sorted(
        (
            each
            for each, ranks in holders.items()
            if len(ranks) == writers[each].identity.world_size
            and (_is_of(shape, writers[each]) or _has_experts(shape, writers[each], indexes))
        ),
        reverse=True,
    )
    logs = [*_logs(root / "memory", nodes)] if is_local else []
    usable = [(index, receiver) for index, receiver, is_intact in logs if is_intact]
    return Left(
        intact=tuple(intact),
        has_any=has_any(root),
        local=best_local(shape, indexes, usable) if is_local else None,
        num_stages=shape.stages,
        has_damaged_logs=len(usable) < len(logs),
        experts=_newest_experts(writers[intact[0]], shape, indexes) if intact else {},
    )


def _sizes(index: Index) -> tuple[object, ...]:
    settings = index.identity.fingerprint
    return (index.identity.world_size, *(settings[name] for name in _SIZES))


def _is_of(shape: Shape, index: Index) -> bool:
    own = (shape.stages, shape.tp, shape.ep, shape.is_sharded)
    return _sizes(index) == (shape.num_ranks, *own)


def _has_experts(shape: Shape, writer: Index, indexes: Sequence[Index]) -> bool:
    """Return whether all of each expert is there in the layout of a state: no other layout begins with it."""
    return len(_whole_experts(writer, indexes)) == shape.num_layers * shape.experts


def _whole_experts(
    writer: Index, indexes: Iterable[Index]
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Return by layer and number the versions in which all of an expert is there in the layout of a state.

    Where weights and moments are saved separately, both must be there; the versions are those of the weights.
    """
    covered: dict[tuple[str, tuple[int, int]], set[int]] = defaultdict(set)
    whole: dict[tuple[int, int], dict[UnitPart, set[tuple[int, int]]]] = defaultdict(
        lambda: defaultdict(set)
    )
    for index in indexes:
        if _sizes(index) != _sizes(writer):
            continue
        for name, entry in (*index.units.items(), *(index.retained or {}).items()):
            unit = parse_unit(name)
            if unit.kind is UnitKind.EXPERT:
                first = entry.tensors[0]
                elements = covered[name, entry.version]
                elements.update(range(first.start, first.end))
                if len(elements) == prod(index.parameters[first.parameter].shape):
                    whole[unit.layer, unit.expert][unit.part].add(entry.version)
    found = {
        expert: versions[UnitPart.WHOLE]
        or (versions[UnitPart.MOMENTS] and versions[UnitPart.WEIGHTS])
        for expert, versions in whole.items()
    }
    return {expert: versions for expert, versions in found.items() if versions}


def _newest_experts(
    writer: Index, shape: Shape, indexes: Sequence[Index]
) -> dict[tuple[int, int], int]:
    """Return the iterations of the versions of experts that a state of another layout comes back with.

    That is the state's own iteration, else the newest of its run, which may be a later one.
    """
    if _is_of(shape, writer):
        return {}
    history, own = writer.identity.history, (writer.identity.start.number, writer.iteration)
    runs = [
        each.identity.history
        for each in indexes
        if is_alive(writer.iteration, history, each.identity.history)
    ]
    run = max(runs, key=lambda each: each[-1].number)
    alive = [each for each in indexes if is_alive(each.iteration, each.identity.history, run)]
    found = _whole_experts(writer, alive).items()
    return {expert: own[1] if own in whole else max(whole)[1] for expert, whole in found}


def has_any(root: Path) -> bool:
    """Return whether anything below a root looks like state."""
    memory = (root / "memory").glob("*/*/*/*.json")
    storage = (root / "storage").glob("iter_*/*manifest*.json")
    return any(map(_is_of_state, memory)) or any(storage)


def _is_of_state(path: Path) -> bool:
    return path.name.startswith(("region_", "breakpoint."))


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


def behind_what_is_counted(
    root: Path, number: int, counted: Mapping[int, Mapping[str, int]]
) -> Iterator[str]:
    """Yield the units of which a peer has only an older version than their rank counts as there.

    Args:
        number: of the start.
        counted: iterations of the versions by unit, by rank.
    """
    newest: dict[tuple[int, str], dict[str, int]] = defaultdict(dict)
    for path in filter(_is_of_state, (root / "memory").glob("*/*/*/*.json")):
        owner, holder = rank_and_holder(path.parent.name)
        index = _index(path)
        if index is None or owner == holder or index.identity.start.number != number:
            continue
        found = newest[index.rank, str(path.parent)]
        for name, unit in index.units.items():
            found[name] = max(found.get(name, -1), unit.iteration)
    for (rank, folder), found in newest.items():
        for name, iteration in counted.get(rank, {}).items():
            if found.get(name, -1) < iteration:
                yield (
                    f"{Path(folder).name} has {name} of {found.get(name)}, and its rank counts {iteration}"
                )


def _in_memory(folder: Path, nodes: Collection[str]) -> Iterator[Index]:
    for path in filter(_is_of_state, folder.glob("*/*/*/*.json")):
        index = _index(path) if path.parents[1].name in nodes else None
        if index is not None and index.is_whole and _is_intact(index, path.parent, path.parent):
            yield index


def _from_parity(folder: Path, nodes: Collection[str]) -> Iterator[Index]:
    """Yield what ranks have lost, and parity has."""
    held = [
        (path.parent, index)
        for path in folder.glob("*/*/rank_*/region_*.json")
        if path.parents[1].name in nodes
        and (index := _index(path)) is not None
        and index.is_whole
        and _is_intact(index, path.parent, path.parent)
    ]
    for index, content in made_again(folder, nodes, held):
        if is_intact(index, content):
            yield index


def _logs(folder: Path, nodes: Collection[str]) -> Iterator[tuple[BoundaryIndex, int, bool]]:
    """Yield the boundary logs, each with the ranks that have received something and whether it is intact."""
    for path in folder.glob("*/*/rank_*/boundary_*.json"):
        if path.parents[1].name not in nodes:
            continue
        try:
            index = decode(path.read_bytes(), BoundaryIndex, str(path))
            content = (path.parent / index.file).read_bytes()
        except (CorruptStateError, OSError):
            continue
        header = content[: index.header_bytes]
        is_intact = xxhash.xxh3_64_hexdigest(header) == index.header_checksum
        damaged = {
            each.neighbour
            for each in index.sent
            if xxhash.xxh3_64_hexdigest(content[each.offset : each.offset + each.num_bytes])
            != each.checksum
        }
        for receiver in {each.neighbour for each in index.sent}:
            yield index, receiver, is_intact and receiver not in damaged


def _on_storage(folder: Path) -> Iterator[Index]:
    for path in folder.glob("iter_*/manifest*.json"):
        try:
            manifest = decode(path.read_bytes(), Manifest, str(path))
        except CorruptStateError:
            continue
        for file in manifest.files:
            index = _index(folder / file.index)
            where = (folder / file.index).parent
            if index is not None and _is_intact(index, where, folder):
                yield index


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
