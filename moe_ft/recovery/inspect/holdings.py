"""Contents of a directory of checkpoints, for `inspect` and for `verify` (verification.py).

It reads persist directories, one checkpoint of them, and memory directories (of all jobs, a job or a node).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ft.config.config import DEFAULT_MEMORY_DIR
from moe_ft.engine.memory.job_directory import find_indexes_below, tier_of
from moe_ft.engine.persist.manifests import checkpoints, find_manifests
from moe_ft.engine.persist.soundness import taken_back
from moe_ft.errors import ConfigError, UnsafePathError
from moe_ft.files.progress import PATIENCE_S
from moe_ft.files.storage import Storage, iteration_directory
from moe_ft.format.entries import lossy_packings
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.format.manifest import MANIFEST_NAME, Manifest
from moe_ft.format.packings import Packing
from moe_ft.planning.branches import order_written
from moe_ft.recovery.inspect.experts import render_experts, summarize_experts
from moe_ft.tables import table
from moe_ft.units import parse_unit

# Megatron's defaults, as a fingerprint has them, but for those that are off, empty or 0.
_STOCK: tuple[tuple[Any, str], ...] = (
    (True, "add-bias-linear add-position-embedding dsa-indexer-rotate-activation"),
    (True, "dsa-indexer-scoring-relu pad-vocab-size yarn-correction-range-round-to-int"),
    (True, "use-layer-wise-param-layout"),
    (1, "context-parallel-size expert-model-parallel-size pipeline-model-parallel-size"),
    (1, "tensor-model-parallel-size dsa-indexer-topk-freq moe-layer-freq num-query-groups mscale"),
    (1, "mup-attn-scale-power mup-embedding-mult mup-output-mult mup-width-mult"),
    (1, "optimizer-offload-fraction rotary-percent rotary-scaling-factor"),
    (2, "moe-router-topk"),
    (4, "linear-conv-kernel-dim"),
    (8, "rope-scaling-factor"),
    (16, "linear-num-key-heads"),
    (32, "kv-lora-rank linear-num-value-heads relative-attention-num-buckets"),
    (64, "qk-pos-emb-head-dim"),
    (128, "linear-key-head-dim linear-value-head-dim qk-head-dim v-head-dim"),
    (128, "relative-attention-max-distance"),
    (1234, "seed"),
    (10000, "rotary-base"),
    (1e-5, "layernorm-epsilon"),
    ("LayerNorm", "normalization"),
    ("adam", "optimizer muon-scalar-optimizer"),
    ("learned_absolute", "position-embedding-type"),
    ("softmax", "moe-router-score-function"),
    ("torch.float32", "exp-avg-dtype exp-avg-sq-dtype main-params-dtype"),
    ("transformer_engine", "transformer-impl"),
    ("vanilla", "softmax-type"),
)
STOCK_DEFAULTS = {f"--{name}": value for value, names in _STOCK for name in names.split()}
_ITERATION_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """State of one iteration in one place.

    Attributes:
        tier: "memory", "replica", "breakpoint" or "storage".
        ranks: owners of the state.
        problem: reason why it cannot be used; empty if nothing is known to be wrong.
        window: snapshots that together hold everything.
        num_snapshots: those that are there.
        storage, manifest: of a checkpoint.
    """

    tier: str
    place: str
    iteration: int
    identity: Identity | None = None
    ranks: tuple[int, ...] = ()
    num_bytes: int = 0
    units: dict[str, tuple[int, str, int]] = field(default_factory=dict)  # iteration, level, bytes
    indexes: tuple[Index, ...] = ()
    problem: str = ""
    window: int = 1
    num_snapshots: int = 1
    storage: Storage | None = None
    manifest: Manifest | None = None


def find_holdings(directory: str, *, with_indexes: bool = True) -> list[Holding]:
    """Return everything that looks like state of moe_ft below a directory or fsspec URL.

    Args:
        with_indexes: whether to read those of checkpoints on storage, and with them the sizes of units.

    Raises:
        ConfigError: if there is nothing.
    """
    holdings = [*_in_storage(directory, with_indexes), *_in_memory(directory)]
    if not holdings:
        raise ConfigError(
            f"{directory} holds no state of moe_ft: no iter_*/manifest.json and no region_*.json. Give "
            "a persist directory, one of its iter_* directories, or a memory directory, by default "
            f"{DEFAULT_MEMORY_DIR}: nothing further below is looked at."
        )
    return holdings


def _storage_of(directory: str) -> tuple[Storage, int | None]:
    """Return the persist directory, and the iteration if one of its checkpoints was named."""
    parent, _, name = directory.rstrip("/").rpartition("/")
    match = _ITERATION_NAME.fullmatch(name)
    if match is None:
        return Storage(directory, PATIENCE_S), None
    return Storage(parent or ".", PATIENCE_S), int(match[1])


def _in_storage(directory: str, with_indexes: bool) -> Iterator[Holding]:
    storage, only = _storage_of(directory)
    try:
        iterations = storage.iterations()
        if only is not None:  # found by its name, whatever a store lists
            is_there = only in iterations or bool(find_manifests(storage, only))
            iterations = [only] if is_there else []
    except NotADirectoryError:
        return
    for iteration, path, found in checkpoints(storage, iterations):
        reason = "it has no manifest"
        try:
            if isinstance(found, Exception):
                raise found
            if found is None or (reason := taken_back(storage, found)):
                place = f"{storage.url}/{iteration_directory(iteration)}"
                problem = f"incomplete: {reason}"
                yield Holding(tier="storage", place=place, iteration=iteration, problem=problem)
                continue
            yield _checkpoint(storage, path, found, with_indexes)
        except OSError as error:
            yield Holding(
                tier="storage",
                place=f"{storage.url}/{path}",
                iteration=iteration,
                problem=f"corrupt: {error}",
                manifest=found if isinstance(found, Manifest) else None,
                storage=storage,
            )


def _checkpoint(storage: Storage, path: str, manifest: Manifest, with_indexes: bool) -> Holding:
    indexes = [storage.index(file.index) for file in manifest.files if with_indexes]
    sizes: Counter[str] = Counter()
    for index in indexes:
        sizes.update({name: unit.num_bytes for name, unit in index.units.items()})
    return Holding(
        tier="storage",
        place=f"{storage.url}/{path.removesuffix('/' + MANIFEST_NAME)}",
        iteration=manifest.iteration,
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
        manifest=manifest,
        storage=storage,
    )


def _in_memory(directory: str) -> Iterator[Holding]:
    for path, index in find_indexes_below(Path(directory), Index):
        tier = tier_of(path)
        if isinstance(index, OSError):
            is_unsafe = isinstance(index, UnsafePathError)
            problem = "not trusted, as in a recovery" if is_unsafe else "corrupt"
            yield Holding(tier=tier, place=str(path), iteration=0, problem=f"{problem}: {index}")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StateInMemory:
    """A state of which memory on this machine holds parts.

    Attributes:
        copies: by rank, those on this machine, a rank's own memory first.
    """

    identity: Identity
    iteration: int
    copies: dict[int, list[Holding]]

    @property
    def missing(self) -> set[int]:
        """Ranks of which there is no copy."""
        return set(range(self.identity.world_size)) - self.copies.keys()


def states_in_memory(holdings: Iterable[Holding]) -> list[StateInMemory]:
    """Return the states of which memory has whole parts: those of the latest start first, then the newest."""
    usable = [
        (each, each.identity)
        for each in holdings
        if not each.problem
        if each.manifest is None and each.identity and each.num_snapshots == each.window
    ]
    histories = order_written((each.iteration, own.history, own.superseded) for each, own in usable)
    place = {history[-1]: number for number, history in enumerate(histories)}
    states: dict[tuple[int, int], StateInMemory] = {}
    for each, own in sorted(usable, key=lambda pair: pair[0].tier == "replica"):
        state = states.setdefault(
            (place[own.start], -each.iteration),
            StateInMemory(identity=own, iteration=each.iteration, copies={}),
        )
        if own == state.identity:
            state.copies.setdefault(each.ranks[0], []).append(each)
    return [states[key] for key in sorted(states)]


def render_holdings(
    holdings: list[Holding], *, lists_units: bool, lists_settings: bool = False
) -> str:
    """Return tables: what there is, the contents of the newest state, and the settings of its run.

    Args:
        holdings: what `find_holdings` has found.
        lists_units: whether to list every unit.
        lists_settings: whether to list the settings with Megatron's default, too.
    """
    rows = [
        (
            each.iteration if not each.problem else "-",
            each.tier,
            _ranks(each.ranks),
            len(each.units),
            f"{each.num_bytes / 2**20:.1f}",
            f"{each.num_snapshots} of {each.window}" if each.identity else "-",
            each.identity.start.number if each.identity else "-",
            each.identity.lineage if each.identity else "-",
            each.problem or each.place,
        )
        for each in sorted(holdings, key=lambda each: (-each.iteration, each.tier, each.place))
    ]
    headers = ("iteration", "tier", "ranks", "units", "MiB", "snapshots", "start", "lineage")
    text = table(rows, (*headers, "where"))
    usable = [each for each in holdings if each.identity is not None]
    if not usable:
        return text
    newest = newest_holding(usable)
    parts = [each for each in usable if _snapshot_of(each) == _snapshot_of(newest)]
    settings = _settings(newest, lists_settings)
    return f"{text}\n\n{_describe(newest, parts, lists_units=lists_units)}\n\n{settings}"


def newest_holding(holdings: list[Holding]) -> Holding:
    """Return the holding that a recovery would prefer."""
    whole = [each for each in holdings if each.num_snapshots == each.window] or holdings
    found = [(each, each.identity) for each in whole if each.identity is not None]
    latest, *_ = order_written(
        (holding.iteration, each.history, each.superseded) for holding, each in found
    )
    own = [holding for holding, each in found if each.start == latest[-1]]
    return max(own, key=lambda each: each.iteration)


def _snapshot_of(holding: Holding) -> tuple[object, ...]:
    """Return the same for all ranks' parts of one snapshot in one tier."""
    start = holding.identity.start if holding.identity else None
    return start, holding.iteration, holding.tier, holding.window, holding.num_snapshots


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
        listed = [(name, *units[name]) for name in ordered]
        contents = table(listed, ("unit", "iteration", "level", "bytes"))
    else:
        kinds = Counter(parse_unit(name).kind.value for name in ordered)
        sizes: Counter[str] = Counter()
        for name in ordered:
            sizes[parse_unit(name).kind.value] += units[name][2]
        summed = [(kind, count, f"{sizes[kind] / 2**20:.2f}") for kind, count in kinds.items()]
        contents = table(summed, ("kind of unit", "units", "MiB"))
    history = ", ".join(
        f"{start.number} from iteration {start.resumed_at}" for start in identity.history
    )
    experts = summarize_experts(index for part in parts for index in part.indexes)
    return "\n\n".join(
        (
            f"iteration {newest.iteration}, {newest.tier}: job {identity.job_id}, strategy "
            f"{identity.strategy}, {identity.world_size} ranks, starts {history}",
            *([_describe_window(newest)] if newest.window > 1 else []),
            *_describe_packings(parts),
            contents,
            *([render_experts(experts)] if experts else []),
        )
    )


def _settings(holding: Holding, lists_all: bool) -> str:
    """Return a table of the settings of a run, and how many others have Megatron's default."""
    assert holding.identity is not None
    given = {name: each for name, each in holding.identity.fingerprint.items() if each is not None}
    others = {name: value for name, value in given.items() if not _is_default(name, value)}
    text = table(sorted((given if lists_all else others).items()), ("setting", "value"))
    num_left = len(given) - len(others)
    if lists_all or not num_left:
        return text
    return f"{text}\n{num_left} more settings have Megatron's defaults: --settings lists them"


def _is_default(name: str, value: Any) -> bool:
    """Return whether a setting has Megatron's default."""
    if name in STOCK_DEFAULTS:
        return bool(value == STOCK_DEFAULTS[name])
    return not value if name.startswith("--") else value == {}


def _describe_packings(parts: list[Holding]) -> list[str]:
    """Return a line on state that is not kept exactly as it is, none if all of it is."""
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
        return f"{text}; it cannot be used until it is complete"
    return (
        f"{text}: a recovery puts them back one after the other, runs {holding.window - 1} iterations "
        f"again, and has all units at iteration {holding.iteration}"
    )
