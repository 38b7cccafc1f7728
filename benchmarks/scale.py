"""Parts of a start that grow with the ranks, at sizes that no machine here has.

    python -m benchmarks.scale

Placements and recoveries are planned by the functions of the product, on one core. So are manifests and the
overview of another layout, for ranks of a model with 16 stages whose 256 experts are divided among 32 ranks,
with the indexes that such ranks write. Seconds are those of the processor, as other processes share it.
The last table is what all that makes of a repair, a start's look and a manifest (scale_costs.py). Agreement
of many ranks in an iteration is in agreement.py.
"""

import argparse
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.conditions import versions
from benchmarks.output import markdown_table, parse_options, show, spread
from benchmarks.scale_costs import Own, table
from moe_ft.engine.persist.manifests import write_manifest
from moe_ft.files.storage import Storage, rank_path
from moe_ft.format.encoding import FORMAT, checksum, encode
from moe_ft.format.entries import GlobalPlace, ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import Identity, Start
from moe_ft.format.index import Index
from moe_ft.format.records import IterationRecord, OptimizerRecord
from moe_ft.planning.levels import divide, plan_levels
from moe_ft.planning.placement import place_replicas, plan_node_memory
from moe_ft.planning.recovery import Plan, Version, plan_recovery, plan_to_keep
from moe_ft.planning.relayout import ModelTensor
from moe_ft.planning.shares import Common, share_out
from moe_ft.recovery.inventory import (
    Inventory,
    look_at_memory,
    look_at_storage,
    merge_packed,
    pack,
)
from moe_ft.recovery.overview import Overview, merge, number_of
from moe_ft.topology import RankInfo, Topology

_SIZES = (64, 1024, 4096, 16384)
_NUM_COUNTED = 512  # ranks whose requests of the store are counted
_NUM_KEPT = 2  # checkpoints on storage
_RANKS_PER_NODE, _NUM_STAGES, _FACTOR = 8, 8, 2
_GOAL_S, _GOAL_BYTES = 5.0, 200 << 20
_NUM_SETTINGS = 150  # of an identity
_SETTINGS_TEXT = "{" + ",".join(f'"--setting-{number}":{number}' for number in range(150)) + "}"
_LAYOUTS = (
    "stages on blocks of nodes",
    "a stage on each node",
    "each stage on all nodes",
)


def _stage_of(layout: str, rank: int, num_ranks: int) -> int:
    if layout == _LAYOUTS[0]:
        return rank * _NUM_STAGES // num_ranks
    return rank // _RANKS_PER_NODE if layout == _LAYOUTS[1] else rank % _RANKS_PER_NODE


def _topology(layout: str, num_ranks: int) -> Topology:
    return Topology(
        ranks=tuple(
            RankInfo(
                rank=rank,
                node=f"node{rank // _RANKS_PER_NODE}",
                stage=_stage_of(layout, rank, num_ranks),
                pid=1,
                address=None,
                region_bytes=100 << 20,
            )
            for rank in range(num_ranks)
        )
    )


def _place(topology: Topology) -> None:
    plan_node_memory(topology, place_replicas(topology, _FACTOR), 2, 2)


def _measure(layout: str, num_ranks: int, num_times: int) -> list[object]:
    topology, seconds = _topology(layout, num_ranks), []
    for _ in range(num_times):
        start = time.perf_counter()
        _place(topology)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    _place(topology)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    is_met = max(seconds) < _GOAL_S and peak_bytes < _GOAL_BYTES
    size = f"{peak_bytes / 2**20:.1f}"
    return [layout, f"{num_ranks:,}", spread(seconds), size, "yes" if is_met else "no"]


class _Recovery:
    """Work of rank 0 in a start: each rank has left two windows, in its own memory and at its peers."""

    def __init__(self, num_ranks: int) -> None:
        self._topology = _topology(_LAYOUTS[0], num_ranks)
        peers = place_replicas(self._topology, _FACTOR)
        self._identity = identity_of(num_ranks)
        self._nodes = {node: Inventory() for node in self._topology.nodes}
        for rank in range(num_ranks):
            for holder in (rank, *peers[rank]):
                for window in range(2):
                    self._leave(rank, holder, window)
        self.tables = [pack(each) for each in self._nodes.values()]
        self.num_versions = sum(len(each.versions) for each in self._nodes.values())
        self._nodes.clear()  # the ranks of nodes have them, not rank 0
        self._found = Inventory()
        self._plans: list[Plan] = []
        self.shared: tuple[Common, list[bytes]] | None = None

    def _leave(self, rank: int, holder: int, window: int) -> None:
        """Leave a window of a rank in the memory of a holder."""
        node = self._topology.ranks[holder].node
        where = f"rank_{rank:05d}" if holder == rank else f"replica_{rank:05d}_{holder:05d}"
        identity = self._nodes[node].add_identity(f"memory of node {node}", self._identity)
        self._nodes[node].versions.append(
            Version(
                rank=rank,
                iteration=100 + 10 * window,
                lineage=identity.lineage,
                history=identity.history,
                node=node,
                path=f"{where}/region_{window}.json",
                is_replica=holder != rank,
                window=10,
                replay_settings=_SETTINGS_TEXT,
            )
        )

    def merge(self) -> None:
        """Merge what the nodes have sent."""
        self._found = merge_packed(self.tables)

    def plan(self) -> None:
        """Plan the ways to recover."""
        ranks = self._topology.ranks
        nodes, stages = [each.node for each in ranks], [each.stage for each in ranks]
        self._plans, _ = plan_recovery(self._found.versions, nodes, stages)

    def cut_up(self) -> None:
        """Give each rank its share."""
        best, num_ranks = self._plans[0], len(self._topology.ranks)
        kept = plan_to_keep(best, self._plans)
        self.shared = share_out(best, kept, num_ranks, needs_elsewhere=True)

    def largest_message_bytes(self) -> int:
        """Return the size of the largest message that a rank sends or gets."""
        assert self.shared is not None
        common, shares = self.shared
        (members,) = plan_levels(range(len(shares)))[-1]
        leaders = {rank * _RANKS_PER_NODE: table for rank, table in enumerate(self.tables)}
        parts = [*divide(leaders, members), *divide(dict(enumerate(shares)), members)]
        return max(len(msgspec.msgpack.encode(each)) for each in (common, *parts))


def _recover(num_ranks: int, num_times: int) -> tuple[list[object], float, float]:
    """Return a row, and seconds of the look and of the plan on rank 0."""
    recovery = _Recovery(num_ranks)
    steps: Sequence[Callable[[], None]] = (recovery.merge, recovery.plan, recovery.cut_up)
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(num_times):
        for step, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    message = recovery.largest_message_bytes() / 2**20
    recovery = _Recovery(num_ranks)
    tracemalloc.start()
    for step in (recovery.merge, recovery.plan, recovery.cut_up):
        step()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    is_met = sum(map(max, seconds)) < _GOAL_S and peak_bytes < _GOAL_BYTES
    row: list[object] = [
        f"{num_ranks:,}",
        f"{recovery.num_versions:,}",
        *map(spread, seconds),
        f"{peak_bytes / 2**20:.1f}",
        f"{message:.2f}",
        "yes" if is_met else "no",
    ]
    merge_s, plan_s, cut_up_s = map(median, seconds)
    return row, merge_s, plan_s + cut_up_s


_STAGES, _EP, _LAYERS, _EXPERTS = 16, 32, 4, 256  # layers of a stage, experts of a layer
_OTHER_STAGES, _OTHER_EP = 8, 64
_RANDOM_STATES = {
    "cpu": "A" * 6700,
    "numpy": [*range(1_000_000_000, 1_000_000_625)],
    "python": [*range(1_000_000_000, 1_000_000_625)],
    "tracker": {"model-parallel-rng": "B" * 6700, "expert-parallel-rng": "C" * 6700},
}


def _experts(stage: int, ep_rank: int, num_stages: int, ep: int) -> Iterator[tuple[int, int]]:
    """Yield the layers and experts of a rank."""
    layers, experts = _STAGES * _LAYERS // num_stages, _EXPERTS // ep
    for layer in range(stage * layers, (stage + 1) * layers):
        for expert in range(ep_rank * experts, (ep_rank + 1) * experts):
            yield layer, expert


def _tensor_of(layer: int, expert: int, name: str) -> ModelTensor:
    return ModelTensor(f"decoder.layers.mlp.experts.experts.{name}.weight", (layer, expert), "")


def index_of(rank: int, identity: Identity) -> Index:
    """Return the index of a rank that has the masters and moments of 32 experts."""
    units, parameters = {}, {}
    for layer, expert in _experts(rank % _STAGES, rank // _STAGES % _EP, _STAGES, _EP):
        tensors = []
        for name in ("linear_fc1", "linear_fc2"):
            of = f"chunk0.decoder.layers.{layer}.mlp.experts.{name}.weight{expert}"
            key, offset, _ = _tensor_of(layer, expert, name)
            shape = (4096, 7168)
            place = GlobalPlace(key, (64, 256, *shape), (*offset, 0, 0), (0, 0), shape)
            parameters[of] = ParameterEntry(shape=shape, places=(place,))
            tensors += [
                TensorEntry(of, kind, 0, 1 << 20, "F32", 0) for kind in ("param", "exp_avg")
            ]
            tensors.append(TensorEntry(of, "exp_avg_sq", 0, 1 << 20, "F32", 0))
        units[f"layer.{layer}.expert.{expert}"] = UnitEntry(
            offset=0,
            num_bytes=24 << 20,
            iteration=100,
            level="full",
            checksum=checksum(of.encode()),
            tensors=tuple(tensors),
        )
    groups = tuple({f"setting-{number}": number for number in range(14)} for _ in range(2))
    record = IterationRecord(
        iteration=100,
        grad_norm=1.0,
        grad_norms_by_group={},
        num_tokens=None,
        optimizers=(OptimizerRecord(groups=groups, steps={"*": 100.0}),) * 2,
        scheduler={f"setting-{number}": number for number in range(12)},
        consumed_train_samples=1,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        num_floating_point_operations=1.0,
        num_microbatches=8,
        rng=_RANDOM_STATES,
        buffers={},
        extra_state={},
        tokens_per_expert={},
    )
    return Index(
        format=FORMAT,
        identity=identity,
        rank=rank,
        node=f"node{rank // _RANKS_PER_NODE}",
        iteration=100,
        file="region_0.safetensors",
        file_bytes=1 << 30,
        header_bytes=1 << 10,
        header_checksum=checksum(b""),
        units=units,
        parameters=parameters,
        records=(record,),
    )


def identity_of(num_ranks: int) -> Identity:
    """Return the run of so many ranks, with as many settings as Megatron has."""
    settings = {f"--setting-{number}": number for number in range(_NUM_SETTINGS)}
    return Identity(
        job_id="job",
        lineage="run",
        history=(Start(number=0, resumed_at=0, name="first"),),
        fingerprint=settings,
        world_size=num_ranks,
        strategy="sparse",
        replay_settings=settings,
    )


def _manifest(num_ranks: int) -> tuple[list[object], float, float]:
    """Write the manifest of a checkpoint, whose indexes are in memory, and look at two of that size.

    Returns a row, and the seconds of both.
    """
    identity, num_bytes = identity_of(num_ranks), 0
    with tempfile.TemporaryDirectory(prefix="scale_", dir="/dev/shm") as folder:
        for rank in range(num_ranks):
            path = Path(folder, rank_path(100, rank, "0" * 8, "json"))
            path.parent.mkdir(exist_ok=True)
            num_bytes += path.write_bytes(encode(index_of(rank, identity)))
        start = time.process_time()
        manifest = write_manifest(Storage(folder), 100, "0" * 8, num_ranks)
        seconds = time.process_time() - start
        start = time.process_time()
        for _ in range(_NUM_KEPT):
            look_at_storage(Storage(folder))
        look_s = time.process_time() - start
    size = len(encode(manifest)) / 2**20
    row: list[object] = [
        f"{num_ranks:,}",
        f"{num_bytes / 2**20:,.0f}",
        f"{seconds:.2f}",
        f"{size:.1f}",
    ]
    return row, seconds, look_s


def _look_at_node() -> float:
    """Return the seconds of a look at the memory of a node, whose ranks have two regions and two replicas."""
    identity = identity_of(_SIZES[-1])
    with tempfile.TemporaryDirectory(prefix="scale_", dir="/dev/shm") as folder:
        for rank in range(_RANKS_PER_NODE):
            names = (
                f"rank_{rank:05d}",
                *(f"replica_{rank:05d}_at_{100 + each:05d}" for each in range(_FACTOR)),
            )
            index = msgspec.structs.replace(index_of(rank, identity), file_bytes=1)
            for path in (Path(folder, name) for name in names):
                path.mkdir(mode=0o700)
                for region in range(2):
                    own = msgspec.structs.replace(
                        index, file=f"region_{region}.safetensors", header_bytes=1
                    )
                    (path / own.file).write_bytes(b"x")
                    (path / f"region_{region}.json").write_bytes(encode(own))
        start = time.process_time()
        found = look_at_memory(Path(folder), "node", "job")
        pack(found)
        seconds = time.process_time() - start
    assert len(found.versions) == 2 * (1 + _FACTOR) * _RANKS_PER_NODE, found.problems
    return seconds


def _overview(num_ranks: int) -> list[object]:
    """Join what the leaders of the top group have found of another layout."""
    identity, version = identity_of(num_ranks), _version_in(num_ranks)
    (members,) = plan_levels(range(num_ranks))[-1]
    leaders = [Overview() for _ in members]
    for rank in range(num_ranks):
        leader = leaders[rank * len(members) // num_ranks]
        leader.add(rank, version(rank), index_of(rank, identity), is_own=True)
    start = time.process_time()
    found = merge(leaders)
    indexes = found.indexes()
    seconds = time.process_time() - start
    needed = _experts(0, 0, _OTHER_STAGES, _OTHER_EP)
    tensors = (_tensor_of(*each, name) for each in needed for name in ("linear_fc1", "linear_fc2"))
    opened = len(found.places_of(map(number_of, tensors)))
    message = len(msgspec.msgpack.encode(found)) / 2**20
    return [f"{num_ranks:,}", f"{seconds:.3f}", f"{message:.2f}", len(indexes), f"{opened:,}"]


def _version_in(num_ranks: int) -> Callable[[int], Version]:
    history = identity_of(num_ranks).history

    def version_of(rank: int) -> Version:
        return Version(
            rank=rank, iteration=100, lineage="run", history=history, node="n", path=f"{rank}"
        )

    return version_of


def _planned(
    sizes: Sequence[int], num_times: int, recovered: Iterable[Sequence[object]]
) -> list[str]:
    """Return what placements and recoveries take."""
    placed = [_measure(layout, size, num_times) for layout in _LAYOUTS for size in sizes]
    headers = ("ranks", "versions", "merge s", "plan s", "cut up s", "MiB at most")
    is_met = "< 5 s and 200 MiB"
    return [
        f"Peers of all ranks and the memory of all nodes, {_RANKS_PER_NODE} ranks a node, {_FACTOR} replicas",
        markdown_table(placed, ("stages", "ranks", "s", "MiB at most", is_met)),
        "Recovery, on rank 0: tables of all nodes become plans, the best one shares of all ranks. Each "
        f"rank has left two windows in its own memory and {_FACTOR} replicas of each",
        markdown_table(recovered, (*headers, "largest message MiB", is_met)),
    ]


def _indexed(sizes: Sequence[int], manifests: Iterable[Sequence[object]]) -> list[str]:
    """Return what manifests and the overview of another layout take."""
    return [
        "Manifest of a checkpoint, by the writer of rank 0, next to training: indexes that it reads, seconds "
        "of a core, and the manifest",
        markdown_table(manifests, ("ranks", "indexes MiB", "s", "manifest MiB")),
        "Recovery in another layout: rank 0 joins what its group has found, and all ranks get that. Heads "
        f"are what ranks had for themselves, each once. A rank of {_OTHER_STAGES} stages with {_OTHER_EP} "
        "ranks for the experts opens some of the indexes, not all",
        markdown_table(
            map(_overview, sizes), ("ranks", "join s", "message MiB", "heads", "indexes opened")
        ),
    ]


def main() -> None:
    """Measure and count, and show both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="of each plan (default 5)")
    options = parse_options(parser, times=1)
    sizes = _SIZES[:2] if options.quick else _SIZES
    recovered = [_recover(size, options.times) for size in sizes]
    manifests, node_s = [_manifest(size) for size in sizes], _look_at_node()
    own = [
        Own(size, plan_s, node_s + merge_s + storage_s, manifest_s)
        for size, (_, merge_s, plan_s), (_, manifest_s, storage_s) in zip(
            sizes, recovered, manifests, strict=True
        )
    ]
    parts = [
        f"One core; median (range) of {options.times}. {versions()}.",
        *_planned(sizes, options.times, (row for row, _, _ in recovered)),
        *_indexed(sizes, (row for row, _, _ in manifests)),
        *table(own, 64 if options.quick else _NUM_COUNTED),
    ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
