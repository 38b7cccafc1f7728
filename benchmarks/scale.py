"""Parts of a start that grow with the ranks, at sizes that no machine here has.

    python -m benchmarks.scale

Placements and recoveries are planned by the functions of the product, on one core. So are manifests, for
ranks of a model with 16 stages whose 256 experts are divided among 32 ranks, with indexes as they write them.
Seconds are those of the processor, as other processes share it. The last table is what all that makes of a
repair, a start's look and a manifest. Measured for it: requests of ranks in a round of repairs, what the
store's process needs for one, a message through a group of eight and back, and the looks. Calculated:
requests and levels at each size. The process of the store has a core of its own there, and the network adds
what it adds. Agreement in an iteration is in agreement.py.
"""

import itertools
import os
import signal
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
import torch.distributed as dist

from benchmarks.output import markdown_table, read_options, show, spread, versions
from megatron.fault_tolerance.repair.store import TorchStore
from moe_ft.cluster import job_store
from moe_ft.cluster.store_client import JobStore
from moe_ft.engine import exchange
from moe_ft.engine.persist.manifests import write_manifest
from moe_ft.files.storage import Storage, rank_path
from moe_ft.format.encoding import FORMAT, checksum, encode
from moe_ft.format.entries import GlobalPlace, ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.format.records import OptimizerRecord
from moe_ft.planning.levels import FAN_OUT, divide, plan_levels
from moe_ft.planning.placement import place_replicas, plan_node_memory
from moe_ft.planning.recovery import Plan, Version, plan_recovery, plan_to_keep
from moe_ft.planning.shares import Common, share_out
from moe_ft.recovery.inventory import (
    Inventory,
    look_at_memory,
    look_at_storage,
    merge_packed,
    pack,
)
from moe_ft.topology import RankInfo, Topology
from tests.many_ranks import TOKEN, measure
from tests.unit.moe_ft.builders import make_identity, make_record

_NUM_CALLS, _NUM_CALLERS = 2000, 8
_NUM_ROUNDS = (
    30  # times that all ranks exchange something in a recovery, counted in a job of 4 ranks
)
_SUMMED_STAGES = 16
_TIMEOUT = timedelta(seconds=60)
_HEADINGS = (
    *("ranks", "requests", "store s", "exchanges s", "look s", "plan s", "repair s"),
    "manifest s",
)


@dataclass(frozen=True, slots=True)
class Constants:
    """Measured figures.

    Attributes:
        per_rank: requests of a rank in a round of repairs.
        request_s: of the store's process, for a request.
        per_member: requests of a member to make a group of gloo.
        hop_s: for a message up to the leader of a group, and down again.
    """

    per_rank: float
    request_s: float
    per_member: float
    hop_s: float


def measure_constants(num_ranks: int) -> Constants:
    """Measure on this machine."""
    _, repair = measure(num_ranks)
    request_s, per_member = _measure_store()
    return Constants(
        (repair.writes + repair.answers) / num_ranks, request_s, per_member, _measure_hop_s()
    )


@contextmanager
def served(num_ranks: int) -> Iterator[Callable[[], TorchStore]]:
    """Keep the job's store in a process of its own; yield what connects to it."""
    listener = job_store.listen_at(("127.0.0.1", 0), is_alone=True)
    port = listener.getsockname()[1]
    if (server := os.fork()) == 0:
        job_store.serve(listener, "", TOKEN, num_ranks)
    listener.close()
    try:
        yield lambda: TorchStore(JobStore(("127.0.0.1", port), "", TOKEN))
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _measure_store() -> tuple[float, float]:
    """Return the seconds of a core for a request, and the requests of a member of a group of gloo."""
    asked = Counter[str]()
    with served(64) as connect:
        (server,) = psutil.Process().children()[-1:]
        stores: list[Any] = [connect() for _ in range(_NUM_CALLERS)]

        def call(store: Any) -> None:
            for _ in range(_NUM_CALLS):
                store.compare_set("key", "-", "-")

        begin_s = sum(server.cpu_times()[:2])
        with ThreadPoolExecutor(_NUM_CALLERS) as pool:
            list(pool.map(call, stores))
        request_s = (sum(server.cpu_times()[:2]) - begin_s) / (_NUM_CALLERS * _NUM_CALLS)
        for store in stores:
            _count(store, asked)
        _make_group(stores)
    return request_s, asked.total() / _NUM_CALLERS


def _count(store: TorchStore, asked: Counter[str]) -> None:
    ask = store._store._ask

    def counting(request: Any) -> Any:
        asked[request.op] += 1
        return ask(request)

    store._store._ask = counting  # type: ignore[method-assign]


def _make_group(stores: Sequence[Any]) -> list[Any]:
    size = len(stores)

    def make(rank: int) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore("group", stores[rank]), rank, size, _TIMEOUT)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def _measure_hop_s(num_times: int = 200) -> float:
    """Return the seconds for a small message of all members of a group up to its leader, and down again.

    The members are threads here and share cores: the best of many times counts.
    """
    store = dist.HashStore()
    groups = _make_group([store] * FAN_OUT)
    together = threading.Barrier(FAN_OUT)

    def pass_on(rank: int) -> float:
        seconds = []
        for _ in range(num_times):
            together.wait()
            begin_s = time.perf_counter()
            found = exchange.gather(groups[rank], b"x" * 100)
            exchange.scatter(groups[rank], [b"x" * 100] * FAN_OUT if found else [])
            seconds.append(time.perf_counter() - begin_s)
        return min(seconds)

    with ThreadPoolExecutor(FAN_OUT) as pool:
        return max(pool.map(pass_on, range(FAN_OUT)))


@dataclass(frozen=True, slots=True)
class Own:
    """Measured seconds at a size: of rank 0 to plan a recovery, of a start's look, and of a manifest."""

    num_ranks: int
    plan_s: float
    look_s: float
    manifest_s: float


def table(sizes: Sequence[Own], num_counted: int) -> list[str]:
    """Return the constants, and a table of what they make at each size.

    Args:
        num_counted: ranks of the repair in which requests are counted.
    """
    known = measure_constants(num_counted)
    return [
        f"Measured: {known.per_rank:.1f} requests of a rank in a round of repairs of {num_counted} ranks, "
        f"{1e6 * known.request_s:.0f} us of the store's process for each; {known.per_member:.1f} requests "
        f"of a member of a group of gloo; {1e3 * known.hop_s:.2f} ms for {FAN_OUT} messages to a leader "
        "and back",
        "A repair without Megatron's own work. Calculated: requests of the rounds, and of the groups of the "
        f"barrier, the agreement and the sums of {_SUMMED_STAGES} stages, made again; {_NUM_ROUNDS} "
        "exchanges of all ranks, which take all levels up and down. Measured: looks, plans, manifests",
        markdown_table((_cost_row(each, known) for each in sizes), _HEADINGS),
    ]


def _cost_row(own: Own, known: Constants) -> tuple[str, ...]:
    num_ranks = own.num_ranks
    num_stages = min(_SUMMED_STAGES, max(1, num_ranks // FAN_OUT))
    # Barrier, agreement, and the sums of the stages.
    members = 2 * _num_members(num_ranks) + num_stages * _num_members(num_ranks // num_stages)
    requests = num_ranks * known.per_rank + members * known.per_member
    store_s = requests * known.request_s
    exchanges_s = _NUM_ROUNDS * len(plan_levels(range(num_ranks))) * known.hop_s
    repair_s = store_s + exchanges_s + own.look_s + own.plan_s
    seconds = (store_s, exchanges_s, own.look_s, own.plan_s, repair_s, own.manifest_s)
    return (f"{num_ranks:,}", f"{requests:,.0f}", *(f"{each:.2f}" for each in seconds))


def _num_members(num_ranks: int) -> int:
    """Return the members of all groups of the levels of some ranks."""
    return sum(len(group) for level in plan_levels(range(num_ranks)) for group in level)


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
_RANDOM_STATES = {
    "cpu": "A" * 6700,
    "numpy": [*range(1_000_000_000, 1_000_000_625)],
    "python": [*range(1_000_000_000, 1_000_000_625)],
    "tracker": {"model-parallel-rng": "B" * 6700, "expert-parallel-rng": "C" * 6700},
}


def index_of(rank: int, identity: Identity) -> Index:
    """Return the index of a rank that has the masters and moments of 32 experts."""
    units, parameters = {}, {}
    first_layer, first_expert = rank % _STAGES * _LAYERS, rank // _STAGES % _EP * _EXPERTS // _EP
    for layer, expert in itertools.product(
        range(first_layer, first_layer + _LAYERS),
        range(first_expert, first_expert + _EXPERTS // _EP),
    ):
        tensors = []
        for name in ("linear_fc1", "linear_fc2"):
            of = f"chunk0.decoder.layers.{layer}.mlp.experts.{name}.weight{expert}"
            key, shape = f"decoder.layers.mlp.experts.experts.{name}.weight", (4096, 7168)
            place = GlobalPlace(key, (64, 256, *shape), (layer, expert, 0, 0), (0, 0), shape)
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
    record = msgspec.structs.replace(
        make_record(100),
        optimizers=(OptimizerRecord(groups=groups, steps={"*": 100.0}),) * 2,
        scheduler={f"setting-{number}": number for number in range(12)},
        rng=_RANDOM_STATES,
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
    return msgspec.structs.replace(
        make_identity(world_size=num_ranks), fingerprint=settings, replay_settings=settings
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


def _indexed(manifests: Iterable[Sequence[object]]) -> list[str]:
    """Return what manifests take."""
    return [
        "Manifest of a checkpoint, by the writer of rank 0, next to training: indexes that it reads, seconds "
        "of a core, and the manifest",
        markdown_table(manifests, ("ranks", "indexes MiB", "s", "manifest MiB")),
    ]


def main() -> None:
    """Measure and count, and show both."""
    options = read_options(times=(5, 1, "of each plan"))
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
        *_indexed(row for row, _, _ in manifests),
        *table(own, 64 if options.quick else _NUM_COUNTED),
    ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
