"""Cost of checkpointing in Python: on the training thread, in parallel with it, and in a recovery.

    python -m benchmarks.planning [--units N] [--quick] [--output FILE.md]

One rank with many units of a few bytes each, so that bookkeeping is all there is. The engine is the one that
training runs; what it is given is made up (benchmarks/stand_ins.py). With a single rank the agreement is
no all-reduce: its time is the network's and not measured here. The goal for the training thread is less
than 1 ms per iteration. Python that runs alongside it counts too, because only one thread runs Python at a
time: "slow-down" is how much longer a loop of small tensor operations takes while a snapshot is under way.
The last tables are of a stage of a large model: counting the tokens of experts, and choosing experts.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, override

import numpy as np
import torch

from benchmarks import stand_ins
from benchmarks.candidate import Site
from benchmarks.ours import MoeFtMemory
from benchmarks.output import conditions, markdown_table, read_options, show, spread
from moe_ft.engine.background import EngineEvent
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.format.encoding import decode, encode
from moe_ft.format.index import Index
from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.recovery import Source, Version
from moe_ft.planning.tiers import MEMORY
from moe_ft.recovery.fetch import read_window
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.left import Left
from moe_ft.recovery.put_back import put_back
from moe_ft.recovery.readers import MemoryReader, Readers
from moe_ft.recovery.transfer import OwnUnits
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.record import CapturedRecord
from moe_ft.state.router_load import RouterLoad
from moe_ft.state.router_load import table as table_of_counts
from moe_ft.strategies.dense import DenseStrategy
from moe_ft.strategies.interface import WindowPlan
from moe_ft.strategies.partial.selection import PartialConfig, RankShare
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.strategies.rotating import PlannedRun
from moe_ft.units import UnitId, UnitKind

ELEMENTS_PER_PARAMETER = 16
GOAL_MS = 1.0
NUM_LAYERS, NUM_EXPERTS, EP_SIZE, TOP_K, NUM_TOKENS = 58, 256, 32, 8, 4096  # of a stage
_DEADLINE_S = 120.0
_SETTLE_S = 0.005
_PROBE_OPERATIONS = 200
HEADERS = ("what", "ms", f"< {GOAL_MS:.0f} ms")

Rows = dict[str, list[float]]  # milliseconds by name


def milliseconds(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


class TimedLayouts(UnitLayouts):
    """Lays out units and notes how long that takes."""

    def __init__(self, catalog: UnitCatalog) -> None:
        super().__init__(catalog, dp_rank=0)
        self.times_ms: list[float] = []

    def lay_out(self, plan: WindowPlan) -> FileLayout:
        """Return the layout of a region."""
        begin = time.perf_counter()
        layout = super().lay_out(plan)
        self.times_ms.append((time.perf_counter() - begin) * 1e3)
        return layout


class EngineRank(MoeFtMemory):
    """One rank of a job of one rank: its parameters and an engine that takes snapshots on demand."""

    def __init__(self, num_units: int, memory: Path) -> None:
        tensor = torch.zeros(ELEMENTS_PER_PARAMETER)
        state = {}
        for index in range(num_units):
            state[f"{index}.weight"] = tensor.bfloat16()
            for name in ("master", "exp_avg", "exp_avg_sq"):
                state[f"{index}.{name}"] = tensor.clone()
        super().__init__(state, Site(rank=0, num_ranks=1, disk=memory, tmpfs=memory))
        self.iteration = 0
        self.start()
        self.engine = self._engine
        self.catalog = self._catalog
        self.strategy = DenseStrategy(self.catalog.units)
        self.node_dir = self._node_dir(self._node)
        self.optimizer = self._optimizer
        self.reports: list[EngineEvent] = []

    @override
    def _layouts(self) -> UnitLayouts:
        self.layouts = TimedLayouts(self._catalog)
        return self.layouts

    def capture(self) -> CapturedRecord:
        """Take the training thread's part of the record of a model without buffers."""
        return self._record_taker.capture(stand_ins.facts(self.iteration))

    def complete_record(self) -> None:
        """Take the copy thread's part of it."""
        self._record_taker.complete(self.capture())

    def end_iteration(self, *, is_due: bool) -> None:
        """Pass the seams of one iteration; the model has no buffers to record."""
        self.iteration += is_due
        self.engine.before_step()
        self.engine.end_iteration(self.iteration, 0.0, self.capture)
        self.engine.drain(self.reports.append)

    def await_snapshot(self, probe: Callable[[], object] = lambda: time.sleep(0.01)) -> float:
        """Call a probe until the snapshot is committed; return its milliseconds."""
        deadline = time.monotonic() + _DEADLINE_S
        while not any(each.event == "snapshot" for each in self.reports):
            probe()
            self.engine.drain(self.reports.append)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no snapshot after {_DEADLINE_S:.0f} s")
        (report,) = (each for each in self.reports if each.event == "snapshot")
        self.reports.clear()
        time.sleep(_SETTLE_S)  # the report comes before the state that the agreement reads
        return float(report.fields["seconds"]) * 1e3


@contextmanager
def running_rank(num_units: int) -> Iterator[EngineRank]:
    """Provide a rank whose engine runs."""
    with tempfile.TemporaryDirectory(prefix="planning_", dir="/dev/shm") as memory:
        rank = EngineRank(num_units, Path(memory))
        yield rank
        rank.engine.close()


def measure_training_thread(rank: EngineRank, repetitions: int) -> Rows:
    """Time what the training thread does in an iteration."""
    names = (
        "strategy.plan_window",
        "no snapshot due",
        "snapshot due, with the record of a model without buffers",
    )
    rows: Rows = {name: [] for name in names}
    first = milliseconds(lambda: rank.end_iteration(is_due=True))
    rank.await_snapshot()
    for _ in range(repetitions):
        rows[names[0]].append(milliseconds(lambda: rank.strategy.plan_window(rank.iteration)))
        rows[names[1]].append(milliseconds(lambda: rank.end_iteration(is_due=False)))
        rows[names[2]].append(milliseconds(lambda: rank.end_iteration(is_due=True)))
        rank.await_snapshot()
    rows["of which its record"] = [milliseconds(rank.capture) for _ in range(repetitions)]
    rows["first snapshot of a plan: its layout is made"] = [first]
    rows["fence right after the start of a snapshot: waits for its copy"] = list(
        _fence_at_once(rank, repetitions)
    )
    return rows


def _fence_at_once(rank: EngineRank, repetitions: int) -> Iterator[float]:
    """Time iterations whose forward and backward take no time."""
    for _ in range(repetitions):
        rank.end_iteration(is_due=True)
        yield milliseconds(lambda: rank.end_iteration(is_due=False))
        rank.await_snapshot()


def measure_record(rank: EngineRank, repetitions: int) -> Rows:
    """Time the copy thread's part of the record, where steps are one number or tensors of parameters."""
    rows: Rows = {}
    masters = rank.optimizer.optimizer.param_groups[0]["params"]
    rows["record, one step for all"] = [
        milliseconds(rank.complete_record) for _ in range(repetitions)
    ]
    for master in masters:
        rank.optimizer.optimizer.state[master]["step"] = torch.tensor(1.0)
    rows["record, a step tensor for each parameter"] = [
        milliseconds(rank.complete_record) for _ in range(repetitions)
    ]
    for master in masters:
        del rank.optimizer.optimizer.state[master]["step"]
    return rows


def measure_beside(rank: EngineRank, repetitions: int) -> tuple[Rows, float, float]:
    """Time a snapshot; return also the slow-down of a busy training thread, and its longest wait in ms."""
    value = torch.zeros(64)

    def probe() -> None:
        for _ in range(_PROBE_OPERATIONS):
            value.add_(1.0)

    alone = median(milliseconds(probe) for _ in range(200))
    waits: list[float] = []
    rows: Rows = {"snapshot, training thread idle": [], "snapshot, training thread busy": []}
    for _ in range(repetitions):
        rank.end_iteration(is_due=True)
        rows["snapshot, training thread idle"].append(rank.await_snapshot())
        rank.end_iteration(is_due=True)
        snapshot_ms = rank.await_snapshot(lambda: waits.append(milliseconds(probe)))
        rows["snapshot, training thread busy"].append(snapshot_ms)
    return rows, sum(waits) / len(waits) / alone, max(waits) - alone


def measure_recovery(rank: EngineRank, repetitions: int) -> Rows:
    """Time what a restart does with the index of one rank."""
    (path,) = own_directory(rank.node_dir, 0).glob(f"*{_newest(rank)}*.json")
    content = path.read_bytes()
    index = decode(content, Index, str(path))
    version = _version_of(index, str(path.relative_to(rank.node_dir)))
    sources = [Source(tier=MEMORY, version=version)]
    fetched = Fetched()

    def fetch_state() -> None:
        nonlocal fetched
        readers = Readers(lambda source: MemoryReader(rank.node_dir / source.version.path))
        left = Left(readers, sources)
        index = left.first_index()
        assert index is not None
        fetched = read_window(left, OwnUnits(left, rank.catalog), index, rank.catalog.units)

    steps: dict[str, Callable[[], object]] = {
        f"encode an index of {len(content) / 1e6:.1f} MB": lambda: encode(index),
        "decode it": lambda: decode(content, Index, str(path)),
        "look_at_memory, two regions": lambda: look_at_memory(
            rank.node_dir, rank._node, stand_ins.JOB_ID
        ),
        "fetch": fetch_state,
        "put_back": lambda: put_back(
            list(fetched.units.values()), rank.catalog, 1, stand_ins.no_fault
        ),
    }
    return {name: [milliseconds(step) for _ in range(repetitions)] for name, step in steps.items()}


def _newest(rank: EngineRank) -> str:
    paths = own_directory(rank.node_dir, 0).glob("region_*.json")
    return max(paths, key=lambda path: path.stat().st_ctime_ns).stem


def _version_of(index: Index, path: str) -> Version:
    return Version(
        rank=index.rank,
        iteration=index.iteration,
        lineage=index.identity.lineage,
        history=index.identity.history,
        node="node_0",
        path=path,
    )


def measure_counting(num_layers: int, count: int) -> Rows:
    """Time the hook on the routers, for all layers of one micro-batch, and the table of an iteration."""
    load, layers = RouterLoad(), [f"layer.{number}" for number in range(num_layers)]
    config = SimpleNamespace(moe_pad_expert_input_to_capacity=False)
    routers: list[Any] = [torch.nn.Module() for _ in layers]
    for router, layer in zip(routers, layers, strict=True):
        router.config = config
        load._names[router] = layer
        load._counts[layer] = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
    probabilities = torch.rand(NUM_TOKENS, NUM_EXPERTS)
    routing_map = torch.zeros(NUM_TOKENS, NUM_EXPERTS, dtype=torch.bool)
    routing_map.scatter_(1, probabilities.topk(TOP_K, dim=1).indices, True)

    def hook_all() -> None:
        for router in routers:
            load._count(router, None, (probabilities, routing_map))

    rows: Rows = {
        f"hooks of {num_layers} routers, a micro-batch of {NUM_TOKENS} tokens": [],
        "table of the iteration": [],
    }
    hooks, tables = rows.values()
    for _ in range(count):
        load.begin()
        hooks.append(milliseconds(hook_all))
        tables.append(milliseconds(lambda: table_of_counts(load.counts(), layers, NUM_EXPERTS)))
    return rows


def measure_selection(num_layers: int, count: int) -> Rows:
    """Time what the strategy does in an iteration with a snapshot."""
    experts = ExpertLayout(num_layers=num_layers, num_experts=NUM_EXPERTS, ep_size=EP_SIZE)
    units = [
        UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)
        for layer in range(num_layers)
        for expert in range(experts.num_local)
    ]
    names = [f"layer.{layer}" for layer in range(num_layers)]
    counts = np.random.default_rng(0).integers(0, 1000, (num_layers, NUM_EXPERTS))
    rows: Rows = {}
    for is_load_aware in (False, True):
        kind = "load-aware" if is_load_aware else "sequential"
        options = PartialConfig(k_snapshot=str(NUM_EXPERTS // 16), selection=kind)
        run = PlannedRun(interval=1, planned_tokens=10**12, tokens_per_iteration=10**6)
        share = RankShare(always_bytes=10**9, unit_bytes=10**8)
        strategy = PartialStrategy([], units, names, experts, options, run, share)
        plans = rows.setdefault(f"plan of a snapshot, {kind}", [])
        rest = rows.setdefault(f"tokens of an iteration, plan and completion, {kind}", [])
        persists = rows.setdefault(f"plan of what goes to storage, {kind}", [])

        def advance(strategy: PartialStrategy, iteration: int) -> None:
            strategy.add_tokens(counts)
            strategy.note_complete(strategy.plan_window(iteration), iteration)

        for iteration in range(count):
            plans.append(milliseconds(partial(strategy.plan_window, iteration)))
            rest.append(milliseconds(partial(advance, strategy, iteration)))
            persists.append(milliseconds(strategy.plan_persist))
    return rows


def table(rows: Rows, *, has_goal: bool) -> str:
    """Return median and range of each row and, if there is a goal, whether the median meets it."""
    lines = []
    for name, times in rows.items():
        is_met = ["yes" if median(times) < GOAL_MS else "NO"] if has_goal else []
        lines.append([name, spread(times), *is_met])
    headers: Sequence[str] = HEADERS if has_goal else HEADERS[:2]
    return markdown_table(lines, headers)


def main() -> None:
    """Measure and print the tables."""
    options = read_options(units=(20_000, 200), repetitions=(9, 1))
    torch.set_num_threads(1)
    count = options.repetitions
    with running_rank(options.units) as rank:
        training = measure_training_thread(rank, count)
        beside, slow_down, wait_ms = measure_beside(rank, count)
        beside |= measure_record(rank, count)
        beside["layout of a plan (included in the first snapshot)"] = rank.layouts.times_ms
        recovery = measure_recovery(rank, count)
    about = conditions(
        f"{options.units} units on one rank, a parameter and three tensors each; median (range) of {count}."
    )
    parts = [about, "Training thread, per iteration", table(training, has_goal=True)]
    parts += ["Alongside the training thread", table(beside, has_goal=False)]
    parts += [
        f"Slow-down of the training thread during a snapshot: {slow_down:.2f} x; longest wait of "
        f"{_PROBE_OPERATIONS} small operations: {wait_ms:.1f} ms."
    ]
    parts += ["Recovery", table(recovery, has_goal=False)]
    layers = 2 if options.quick else NUM_LAYERS
    parts += ["Counting tokens", table(measure_counting(layers, count), has_goal=False)]
    parts += ["Selection, training thread", table(measure_selection(layers, count), has_goal=True)]
    show(parts, options.output)


if __name__ == "__main__":
    main()
