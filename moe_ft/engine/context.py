"""Inputs of the checkpoint engine: settings, facts about its rank and job, the restored state, layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ft.engine.agreement import Sum
from moe_ft.engine.background import PhaseHook
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.memory.pool import FetchedVersion
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.persist.writer import WriterSettings
from moe_ft.format.entries import ModelPlaces
from moe_ft.format.identity import Identity, Start
from moe_ft.format.index import Index
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.recovery import Family
from moe_ft.state.parameters import LocalParameter
from moe_ft.topology import RankInfo, Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings from the flags.

    Attributes:
        interval: iterations between snapshots, None for automatic.
        persist_interval: complete snapshots between those that go to storage, 0 for never.
        dense_interval: iterations between whole states that go to storage, 0 for none before the end.
        raises: end training when a background part fails.
        staging_bytes: device memory in which snapshots are packed, 0 if nothing is.
    """

    interval: int | None
    overhead_limit: float
    persist_interval: int
    raises: bool
    staging_bytes: int = 0
    dense_interval: int = 0

    @property
    def persists(self) -> bool:
        """True if anything goes to storage."""
        return self.persist_interval > 0 or self.dense_interval > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineContext:
    """Facts about the engine's rank and job.

    Attributes:
        model_places: what Megatron's checkpoints hold besides parameters.
        memory: this rank's share of the node's; the engine opens it.
        origins: checksums, by unit name, of the rotating units' weights in the run's first state.
        stage_load: adds up what the ranks of the stage count; None where nothing is counted.
        peers: ranks that keep this rank's replicas.
        server: listens already.
        token: the secret that peers share.
        traffic: what the pipeline sends, if that is logged.
        record_settings: for the boundary log, see `BoundaryIndex`.
        writer: settings of the node's writer process; None on all but the lowest rank of a node
            and without storage.
        breakpoint: layout of the rank's breakpoint; None without one.
        storage_trouble: why the persist directory cannot be used when the start begins; empty if it can be.
    """

    rank: int
    topology: Topology
    identity: Identity
    parameters: Sequence[LocalParameter]
    model_places: ModelPlaces
    memory: RankMemory
    origins: Mapping[str, str]
    stage_load: Sum | None
    peers: tuple[RankInfo, ...]
    server: PeerServer
    token: str
    writer: WriterSettings | None
    phase_hook: PhaseHook
    breakpoint: FileLayout | None = None
    traffic: PipelineTraffic | None = None
    record_settings: Mapping[str, Any] = field(default_factory=dict)
    storage_trouble: str = ""

    @property
    def is_on_gpu(self) -> bool:
        """True if any parameter of the rank is on a GPU."""
        return any(each.parameter.is_cuda for each in self.parameters)

    @property
    def persist_dir(self) -> Path:
        """The directory of requests to the node's writer, and of its results."""
        return self.memory.node_dir / "persist"


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedWindow:
    """A window as it was read from somewhere else.

    Attributes:
        index: of the window, all whose units lie in its region.
        contents: by offset, the bytes of every unit version.
    """

    index: Index
    contents: Mapping[int, memoryview]


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """Recovered state of this rank, as the engine takes it over: what to keep, and what peers lack.

    Attributes:
        indexes: of the regions that it was read from.
        rotating: the current versions of rotating units, by name.
        persisted_index: this rank's index in the newest complete checkpoint on storage, relative to the
            persist directory; empty if there is none, None if storage could not be read.
        family: of the versions that regions keep until a new window is complete, as planning/recovery.py has
            it: of those that were put back, or the newest before breakpoints.
        replay_from: the first iteration that a stage may have to run again until then.
        needs_breakpoint: whether the recovery rests on breakpoints, which must be kept as long.
        is_on_storage: whether storage has this state as one snapshot of everything.
        window: what was read, unless all of it lies in a region of this rank, or storage has it too.
        peers_without: peers of this rank that do not have it; none if storage has.
    """

    indexes: frozenset[Path]
    rotating: Mapping[str, FetchedVersion]
    persisted_index: str | None
    family: Family
    is_on_storage: bool = False
    window: FetchedWindow | None = None
    peers_without: frozenset[int] = frozenset()
    needs_breakpoint: bool = False
    replay_from: int = 0

    @property
    def start(self) -> Start:
        """The start that wrote what regions keep."""
        return self.family[-1]

    @property
    def iteration(self) -> int:
        """The iteration of what regions keep."""
        return self.family[0]
