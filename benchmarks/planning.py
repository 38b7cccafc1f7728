"""Cost of checkpointing in Python: on the training thread, in parallel with it, and in a recovery.

    python -m benchmarks.planning [--units N] [--ranks N] [--iterations N] [--quick] [--output FILE.md]

One rank with many units of a few bytes each, so that bookkeeping is all there is. The engine is the one that
training runs; what it is given is made up (benchmarks/stand_ins.py). With a single rank the agreement is
no all-reduce: its time is the network's and not measured here. The goal for the training thread is less
than 1 ms per iteration. Python that runs alongside it counts too, because only one thread runs Python at a
time: "slow-down" is how much longer a loop of small tensor operations takes while a snapshot is under way.
"""

import argparse
import itertools
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks import stand_ins
from benchmarks.output import markdown_table, parse_options, show
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.background import Report
from moe_ft.engine.build import build_engine
from moe_ft.engine.engine import CheckpointEngine, EngineContext, EngineSettings
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.format.encoding import decode, encode
from moe_ft.format.entries import ModelPlaces
from moe_ft.format.identity import Start
from moe_ft.format.index import Index
from moe_ft.planning.recovery import Source, Tier, Version, plan_recovery
from moe_ft.recovery.fetch import fetch_window
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.put_back import put_back
from moe_ft.recovery.readers import MemoryReader, Readers
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.record import CapturedRecord
from moe_ft.strategies.dense import DenseStrategy
from moe_ft.strategies.interface import WindowPlan
from moe_ft.topology import RankInfo, Topology

ELEMENTS_PER_PARAMETER = 16
GOAL_MS = 1.0
_NODE = "node"
_RANKS_PER_NODE = 8
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


class EngineRank:
    """One rank of a job of one rank: its parameters and an engine that takes snapshots on demand."""

    def __init__(self, num_units: int, memory: Path) -> None:
        tensor = torch.zeros(ELEMENTS_PER_PARAMETER)
        state = {}
        for index in range(num_units):
            state[f"{index}.weight"] = tensor.bfloat16()
            for name in ("master", "exp_avg", "exp_avg_sq"):
                state[f"{index}.{name}"] = tensor.clone()
        self.optimizer = stand_ins.adam()
        self.parameters = stand_ins.parameters_of(state, self.optimizer)
        self.strategy = DenseStrategy(each.unit for each in self.parameters)
        self.node_dir = memory / _NODE
        self.iteration = 0
        self.catalog = stand_ins.catalog_of(self.parameters)
        self.layouts = TimedLayouts(self.catalog)
        self._record_taker = stand_ins.record_taker(self.optimizer, self.parameters)
        self.engine = self._make_engine()
        self.engine.start(0, restored=None)
        self.reports: list[Report] = []

    def capture(self) -> CapturedRecord:
        """Take the training thread's part of the record of a model without buffers."""
        return self._record_taker.capture(stand_ins.facts(self.iteration))

    def complete_record(self) -> None:
        """Take the copy thread's part of it."""
        self._record_taker.complete(self.capture())

    def _make_engine(self) -> CheckpointEngine:
        info = RankInfo(
            rank=0,
            node=_NODE,
            stage=0,
            pid=os.getpid(),
            address=None,
            region_bytes=self.layouts.lay_out(self.strategy.plan_window(0)).num_bytes,
        )
        topology = Topology(ranks=(info,))
        context = EngineContext(
            rank=0,
            topology=topology,
            identity=stand_ins.identity(1),
            parameters=self.parameters,
            model_places=ModelPlaces(),
            memory=RankMemory(self.node_dir, 0, topology, [], persists=False),
            origins={},
            stage_load=None,
            peers=(),
            server=PeerServer(self.node_dir, "127.0.0.1"),
            token="",
            writer=None,
            phase_hook=stand_ins.no_fault,
        )
        settings = EngineSettings(
            interval=1, overhead_limit=0.05, persist_interval=0, raises=True, persists=False
        )
        return build_engine(
            settings,
            context,
            self.strategy,
            Agreement(_DEADLINE_S),
            self.layouts,
            self._record_taker.complete,
        )

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
    sources = [Source(tier=Tier.MEMORY, version=version)]
    fetched = Fetched()

    def fetch_state() -> None:
        nonlocal fetched
        readers = Readers(lambda source: MemoryReader(rank.node_dir / source.version.path))
        fetched = fetch_window(sources, rank.catalog.units, rank.catalog, readers)

    steps: dict[str, Callable[[], object]] = {
        f"encode an index of {len(content) / 1e6:.1f} MB": lambda: encode(index),
        "decode it": lambda: decode(content, Index, str(path)),
        "look_at_memory, two regions": lambda: look_at_memory(
            rank.node_dir, _NODE, stand_ins.JOB_ID
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
        node=_NODE,
        path=path,
    )


def many_versions(num_ranks: int, num_iterations: int) -> tuple[list[Version], list[str]]:
    """Return the state of many ranks in memory, at two peers and on storage, and the ranks' nodes."""
    node_of = [f"node_{rank // _RANKS_PER_NODE}" for rank in range(num_ranks)]
    versions = []
    for iteration, rank in itertools.product(range(num_iterations), range(num_ranks)):
        for hop, place in enumerate(("rank", "replica", "replica", "iter")):
            holder = (rank + hop * _RANKS_PER_NODE) % num_ranks
            versions.append(
                Version(
                    rank=rank,
                    iteration=iteration,
                    lineage="lineage",
                    history=(Start(number=0, resumed_at=0, name="start"),),
                    node=None if place == "iter" else node_of[holder],
                    path=f"{place}_{rank:05d}_at_{holder:05d}/region_{iteration % 2}.json",
                    is_replica=place == "replica",
                )
            )
    return versions, node_of


def measure_plan(num_ranks: int, num_iterations: int, repetitions: int) -> Rows:
    """Time the plan of a recovery, which every rank makes for itself."""
    versions, node_of = many_versions(num_ranks, num_iterations)
    name = (
        f"plan_recovery, {num_ranks} ranks, {num_iterations} iterations, {len(versions)} versions"
    )
    times = [milliseconds(lambda: plan_recovery(versions, node_of)) for _ in range(repetitions)]
    return {name: times}


def table(rows: Rows, *, has_goal: bool) -> str:
    """Return median and range of each row and, if there is a goal, whether the median meets it."""
    lines = []
    for name, times in rows.items():
        middle = median(times)
        line = [name, f"{middle:.3f} ({min(times):.3f}-{max(times):.3f})"]
        lines.append([*line, "yes" if middle < GOAL_MS else "NO"] if has_goal else line)
    headers: Sequence[str] = HEADERS if has_goal else HEADERS[:2]
    return markdown_table(lines, headers)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=1024, help="of the recovery that is planned")
    parser.add_argument("--iterations", type=int, default=4, help="that are found for each rank")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parse_options(parser, units=200, ranks=8, iterations=2, repetitions=1)
    torch.set_num_threads(1)
    count = options.repetitions
    with running_rank(options.units) as rank:
        training = measure_training_thread(rank, count)
        beside, slow_down, wait_ms = measure_beside(rank, count)
        beside |= measure_record(rank, count)
        beside["layout of a plan (included in the first snapshot)"] = rank.layouts.times_ms
        recovery = measure_recovery(rank, count)
    recovery |= measure_plan(options.ranks, options.iterations, count)
    conditions = (
        f"{os.cpu_count()} cores; {options.units} units on one rank, a parameter and three tensors "
        f"each; median (range) of {count}; load {os.getloadavg()[0]:.1f}. "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )
    parts = [conditions, "Training thread, per iteration", table(training, has_goal=True)]
    parts += ["Alongside the training thread", table(beside, has_goal=False)]
    parts += [
        f"Slow-down of the training thread during a snapshot: {slow_down:.2f} x; longest wait of "
        f"{_PROBE_OPERATIONS} small operations: {wait_ms:.1f} ms."
    ]
    parts += ["Recovery", table(recovery, has_goal=False)]
    show(parts, options.output)


if __name__ == "__main__":
    main()
