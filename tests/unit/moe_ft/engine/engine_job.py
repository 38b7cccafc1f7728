"""A job of one rank with a real engine: real regions, records, formats, storage.

Only the surroundings are made for tests: time passes when a test says so, workers have no threads, and the
writer serves when somebody sleeps.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_ft.config.config import MoeFtConfig, StorageConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.background import EngineEvent
from moe_ft.engine.build import build_engine
from moe_ft.engine.ending import Ending
from moe_ft.engine.engine import CheckpointEngine, EngineContext
from moe_ft.engine.links.peers import PeerReplicator
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.persist.requests import request_path
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.faults import Phase
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import decode
from moe_ft.format.entries import ModelPlaces
from moe_ft.format.index import Index, check_units
from moe_ft.recovery.assembly import lay_out_breakpoint
from moe_ft.state.record import CapturedRecord, IterationFacts, LoopCounters
from moe_ft.strategies.dense import DenseStrategy
from moe_ft.strategies.interface import WindowPlan
from moe_ft.topology import RankInfo, Topology
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_identity
from tests.unit.moe_ft.engine.stand_ins import ManualClock, ManualWorker
from tests.unit.moe_ft.small_rank import SmallRank, window_plan

RECORD_S, DEADLINE_S = 0.25, 120.0


class WindowStrategy(DenseStrategy):
    """Windows of three snapshots."""

    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        """Return a window in which each unit is FULL where `window_position` says."""
        return window_plan(3)

    def possible_windows(self) -> list[WindowPlan]:
        """Return the only kind."""
        return [self.plan_window(0)]


class JobClock(ManualClock):
    """Time of one rank, in which its node's writer serves while the rank sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.serve: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        """Let time pass, and the writer serve."""
        super().sleep(seconds)
        self.serve()


def capture(iteration: int) -> CapturedRecord:
    """Return the record of a model without buffers and a loop without a scheduler."""
    facts = IterationFacts(
        iteration=iteration,
        grad_norm=1.5,
        num_tokens=None,
        num_floating_point_operations=1e15,
        tokens_per_expert={},
        counters=LoopCounters(consumed_train_samples=8 * iteration, num_microbatches=1),
    )
    generators = {
        "python": random.Random(iteration).getstate(),
        "numpy": np.random.RandomState(iteration).get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.get_rng_state(),
        "tracker": {},
    }
    values: dict[str, Any] = {
        "grad_norms_by_group": {},
        "optimizers": [],
        "scheduler": {"num_steps": iteration},
        "rng": generators,
        "buffers": {},
        "extra_state": {},
        "num_tokens": None,
        "tokens_per_expert": {},
    }
    return CapturedRecord(facts=facts, values=values)


@dataclass(kw_only=True)
class Setup:
    """Settings of a job.

    Attributes:
        has_breakpoints: whether the ranks have memory for breakpoints.
    """

    interval: int | None = 1
    persist_interval: int = 0
    raises: bool = False
    has_breakpoints: bool = False
    has_windows: bool = False


class Rank:
    """One rank of a job.

    Attributes:
        hook: called in the middle of the background parts, with the phase and the iteration.
        workers: by name.
        reports: that were drained.
    """

    def __init__(self, job: "Job", rank: int) -> None:
        self.job, self.rank, self.setup = job, rank, job.setup
        self.clock = JobClock()
        self.hook: Callable[[Phase, int], None] = lambda phase, iteration: None
        self.workers: dict[str, ManualWorker] = {}
        self.reports: list[EngineEvent] = []
        self.state = SmallRank(rank)
        self.layouts = UnitLayouts(self.state.catalog(), 0)
        self.strategy = (WindowStrategy if self.setup.has_windows else DenseStrategy)(WINDOW_UNITS)
        (plan,) = self.strategy.possible_windows()
        self.layouts.region_bytes = self.layouts.lay_out(plan).num_bytes
        self.breakpoint = None
        if self.setup.has_breakpoints:
            live = UnitLayouts(self.state.catalog(), 0)
            self.breakpoint = lay_out_breakpoint(self.strategy, live)
        self.node_dir = job.folder / f"node-{rank}"
        self.server = PeerServer(self.node_dir, "127.0.0.1")
        self.memory: RankMemory
        self.context: EngineContext
        self.engine: CheckpointEngine

    @property
    def info(self) -> RankInfo:
        """The rank as the others see it."""
        assert self.layouts.region_bytes is not None
        return RankInfo(
            rank=self.rank,
            node=f"node-{self.rank}",
            stage=0,
            pid=1,
            address=self.server.address,
            region_bytes=self.layouts.region_bytes,
            breakpoint_bytes=0 if self.breakpoint is None else self.breakpoint.num_bytes,
        )

    def give(self, topology: Topology) -> None:
        """Make what the engine is given."""
        persists = self.setup.persist_interval > 0
        self.memory = RankMemory(self.node_dir, self.rank, topology, [], persists=persists)
        self.context = EngineContext(
            rank=self.rank,
            topology=topology,
            identity=make_identity(),
            parameters=self.state.parameters,
            model_places=ModelPlaces(),
            memory=self.memory,
            origins={},
            stage_load=None,
            peers=(),
            server=self.server,
            token="token",
            writer=None,
            phase_hook=lambda phase, iteration: self.hook(phase, iteration),
            breakpoint=self.breakpoint,
        )
        self.engine = self.build(
            clock=self.clock, make_worker=self._make_worker, replicator=self.job.replicator
        )

    def build(self, **own: Any) -> CheckpointEngine:
        """Return an engine with parts for tests, or with those of training."""
        every = self.setup.persist_interval
        config = MoeFtConfig(
            strategy=StrategyConfig(
                interval="auto" if self.setup.interval is None else str(self.setup.interval),
                overhead_limit=0.05,
                on_error="raise" if self.setup.raises else "degrade",
            ),
            storage=StorageConfig(
                persist_dir="/nowhere" if every else None, persist_interval=every
            ),
        )
        return build_engine(
            config,
            self.context,
            self.strategy,
            Agreement(DEADLINE_S),
            self.layouts,
            lambda captured: None,
            **own,
        )

    def _make_worker(self, name: str) -> ManualWorker:
        self.workers[name] = ManualWorker()
        return self.workers[name]

    def capture(self, iteration: int) -> CapturedRecord:
        """Take a record, which takes a while."""
        self.clock.now += RECORD_S
        return capture(iteration)

    def events(self, name: str) -> list[EngineEvent]:
        """Return all reports of an event so far."""
        self.engine.drain(self.reports.append)
        return [each for each in self.reports if each.event == name]

    def reasons(self, event: str = "degraded") -> list[tuple[str, str]]:
        """Return part and reason of all failures so far, or of what was skipped."""
        return [(each.fields["part"], each.fields["reason"]) for each in self.events(event)]

    def indexes(self) -> list[Index]:
        """Return what the rank's regions hold, in the order of iterations, each checked bit for bit."""
        found = []
        for region in self.memory.regions:
            if region.index_path.exists():
                index = decode(region.index_path.read_bytes(), Index, str(region.index_path))
                content = memoryview(region.mapping)
                check_units(index, {"": content}, "the region")
                for name, entry in index.entries():
                    assert self.state.has_written(content, name, entry), name
                found.append(index)
        return sorted(found, key=lambda index: index.iteration)


@dataclass
class Job:
    """A rank that trains alone.

    Attributes:
        iteration: of the state now.
        is_started: whether the engines are.
        replicator: in the place of connections to peers.
    """

    folder: Path
    setup: Setup
    iteration: int = 0
    ranks: list[Rank] = field(default_factory=list)
    is_started: bool = True
    replicator: PeerReplicator | None = None

    def __post_init__(self) -> None:
        self.storage = Storage(str(self.folder / "storage"))
        self.ranks = [Rank(self, 0)]
        topology = Topology(ranks=tuple(rank.info for rank in self.ranks))
        for rank in self.ranks:
            rank.give(topology)
        for rank in self.ranks if self.is_started else ():
            rank.engine.start(0, None)
            if self.setup.persist_interval:
                rank.clock.serve = Writer(rank).serve

    def run(self, iterations: Iterable[int]) -> None:
        """Train: pass the seams of these iterations on all ranks."""
        for iteration in iterations:
            self.before_step()
            self.end_iteration(iteration)

    def before_step(self) -> None:
        """Reach the fence of an iteration."""
        for rank in self.ranks:
            rank.engine.before_step()

    def end_iteration(self, iteration: int) -> list[float]:
        """Step, and pass the end of an iteration; return the stalls that the engines measured."""
        self.iteration = iteration
        for rank in self.ranks:
            rank.state.step(iteration)
        return [
            rank.engine.end_iteration(iteration, 1.0, partial(rank.capture, iteration))
            for rank in self.ranks
        ]

    def finish(self) -> Ending:
        """End training after its last iteration; return how."""
        (rank,) = self.ranks
        capture = partial(rank.capture, self.iteration)
        return rank.engine.finish(self.iteration, capture, rank.reports.append, is_complete=True)

    def close(self) -> None:
        """End all engines."""
        for rank in self.ranks:
            rank.engine.close()


class Writer:
    """The writer of a rank's node, which serves when it is told to."""

    def __init__(self, rank: Rank) -> None:
        self._path = request_path(rank.node_dir / "persist", rank.rank)
        self._worker = PersistWorker(rank.node_dir / "persist", rank.job.storage, keep=2)

    def serve(self) -> None:
        """Serve the rank's request, if there is one."""
        if self._path.exists():
            self._worker._serve(self._path, self._path.read_bytes())


MakeJob = Callable[..., Job]
