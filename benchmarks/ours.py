"""moe_ft's engine behind the interface of benchmarks/candidate.py, to be measured by benchmarks/stall.py.

The engine is the one that training runs, called at the same seams: ``before_step`` is the fence, ``save`` and
``poll`` are the end of an iteration with and without a snapshot due. Only what it is given is made up
(benchmarks/stand_ins.py). It saves masters and moments: forward's weights follow from the masters, here
as in Megatron. A checkpoint is complete when the last of its files has its final name; the time is that
of the rename, also where a later poll notices it.
"""

import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from msgspec.msgpack import Decoder

from benchmarks.candidate import Candidate, Site, State
from benchmarks.peers import prepare_for_megatron
from moe_ft.config.config import MoeFtConfig, StorageConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.exchange import TEXT
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.job_directory import node_directory, own_directory, replica_directory
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.persist.requests import WriterSettings
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.files.storage import Storage
from moe_ft.format.entries import ModelPlaces
from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.placement import place_replicas, sources_of
from moe_ft.planning.recovery import Source, Version
from moe_ft.planning.tiers import MEMORY, PEER, STORAGE, Tier
from moe_ft.recovery.assembly import RankSizes, measure_sizes
from moe_ft.recovery.inventory import look_at_memory, look_at_storage
from moe_ft.recovery.left import Left
from moe_ft.recovery.readers import (
    MemoryReader,
    Opener,
    PeerReader,
    Readers,
    StorageReader,
)
from moe_ft.recovery.transfer import OwnUnits
from moe_ft.strategies.dense import DenseStrategy
from moe_ft.strategies.interface import Strategy
from moe_ft.strategies.partial.selection import PartialConfig, RankShare
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.strategies.rotating import PlannedRun
from moe_ft.strategies.sparse.strategy import SparseConfig, SparseStrategy
from moe_ft.strategies.sparse.windows import RankUnits
from moe_ft.topology import RankInfo, Topology
from moe_ft.units import Level

_AGREEMENT_TIMEOUT_S = 600.0
_RETRY_S = 0.002
_INFO, _UNITS = Decoder(RankInfo), Decoder(RankUnits)
_KEEP = 2  # checkpoints on storage, the default of --moe-ft-keep


class MoeFtMemory(Candidate):
    """Two regions per rank in host memory; both ranks on one node."""

    requires = ("megatron.core",)
    complete_means = "RAM"
    replication_factor: ClassVar[int] = 0
    persists: ClassVar[bool] = False
    window: ClassVar[int] = 1  # snapshots that make a checkpoint

    def __init__(self, state: State, site: Site) -> None:
        super().__init__(state, site)
        prepare_for_megatron()
        from benchmarks import stand_ins  # imports Megatron

        self._stand_ins = stand_ins
        self._optimizer = stand_ins.adam()
        self._parameters = stand_ins.parameters_of(state, self._optimizer)
        self._record_taker = stand_ins.record_taker(self._optimizer, self._parameters)
        self._nodes = self._name_nodes()
        self._node = self._nodes[site.rank]
        self._persist_dir = site.disk / "persist"
        self._saved_iteration = self._num_steps = 0  # since the save
        self._committed_ns = 0  # when the checkpoint before the latest was complete
        self._has_stepped = False
        self._ended_s = time.perf_counter()  # the iteration before

    def _name_nodes(self) -> list[str]:
        """Return the node id of every rank; replicas go to other nodes only."""
        ranks = range(self.site.num_ranks)
        return [f"node_{rank if self.replication_factor else 0}" for rank in ranks]

    def _node_dir(self, node: str) -> Path:
        return node_directory(str(self.site.tmpfs), self._stand_ins.JOB_ID, node)

    def start(self) -> None:
        """Start an engine with warm regions, as moe_ft/recovery/protect.py does."""
        from moe_ft.engine.build import build_engine

        self._persist_dir.mkdir(exist_ok=True)
        agreement = Agreement(_AGREEMENT_TIMEOUT_S)
        agreement.start()
        self._catalog = self._stand_ins.catalog_of(self._parameters)
        layouts = self._layouts()
        strategy = self._strategy(agreement)
        config = MoeFtConfig(
            strategy=StrategyConfig(on_error="raise"),
            storage=StorageConfig(
                persist_dir=str(self._persist_dir) if self.persists else None, persist_interval=1
            ),
        )
        self._engine = build_engine(
            config,
            self._context(agreement, strategy, measure_sizes(strategy, layouts)),
            strategy,
            agreement,
            layouts,
            self._record_taker.complete,
        )
        self._engine.start(0, restored=None)

    def _layouts(self) -> UnitLayouts:
        return UnitLayouts(self._catalog, dp_rank=0)

    def _strategy(self, agreement: Agreement) -> Strategy:
        return DenseStrategy(self._catalog.units)

    def _context(self, agreement: Agreement, strategy: Strategy, sizes: RankSizes) -> Any:
        """Meet the other rank and place replicas. All ranks."""
        from moe_ft.engine.engine import EngineContext

        rank, node_dir = self.site.rank, self._node_dir(self._node)
        server = PeerServer(node_dir, "127.0.0.1")
        server.start()
        info = RankInfo(
            rank=rank,
            node=self._node,
            stage=0,
            pid=os.getpid(),
            address=server.address,
            region_bytes=sizes.region_bytes,
            slot_bytes=sizes.slot_bytes,
            num_slots=sizes.num_slots,
        )
        self._topology = Topology(ranks=tuple(agreement.gather(info, _INFO)))
        self._token = agreement.gather(secrets.token_hex(16), TEXT)[0]
        server.admit(self._token)
        peers = place_replicas(self._topology, self.replication_factor)
        identity = self._stand_ins.identity(self.site.num_ranks)
        writer = None
        if self.persists and self._topology.lowest_on_node(self._node).rank == rank:
            writer = WriterSettings(
                url=str(self._persist_dir), keep=_KEEP, parent=os.getpid(), lock_owner=""
            )
        return EngineContext(
            rank=rank,
            topology=self._topology,
            identity=identity,
            parameters=self._parameters,
            model_places=ModelPlaces(),
            memory=RankMemory(
                node_dir,
                rank,
                self._topology,
                sources_of(peers, rank),
                persists=self.persists,
            ),
            origins=self._catalog.origins(sorted(strategy.rotation.units)),
            stage_load=None,
            peers=tuple(self._topology.ranks[peer] for peer in peers[rank]),
            server=server,
            token=self._token,
            writer=writer,
            phase_hook=self._stand_ins.no_fault,
        )

    def save(self, iteration: int) -> None:
        """End an iteration after which a snapshot is due."""
        self._committed_ns = self._newest_commit_ns()
        self._saved_iteration, self._num_steps = iteration, 0
        self._ended_s = time.perf_counter()
        while self._end_iteration():  # the ranks agreed at the last fence that it could not start
            time.sleep(_RETRY_S)

    def _end_iteration(self) -> bool:
        """Return whether a snapshot was due and skipped, which all ranks decide alike."""
        self._has_stepped = False
        now_s = time.perf_counter()
        iteration_s, self._ended_s = now_s - self._ended_s, now_s
        # No number after those of the window: the next one is due when the benchmark saves again.
        iteration = self._saved_iteration + min(self._num_steps, self.window - 1)
        self._engine.end_iteration(
            iteration,
            iteration_s,
            lambda: self._record_taker.capture(self._stand_ins.facts(iteration)),
        )
        events: list[str] = []
        self._engine.drain(lambda report: events.append(report.event))
        return "skipped" in events

    def poll(self) -> None:
        """End an iteration after which none is due, if one has ended; note the completion."""
        if self._has_stepped:
            self._num_steps += 1
            self._end_iteration()
        if self.completed_s is None:
            newest_ns = self._newest_commit_ns()
            if newest_ns > self._committed_ns:
                self.completed_s = time.perf_counter() - (time.time() - newest_ns / 1e9)

    def _newest_commit_ns(self) -> int:
        newest = 0
        for path in self._commits():
            with suppress(FileNotFoundError):
                newest = max(newest, path.stat().st_ctime_ns)
        return newest

    def _commits(self) -> Iterator[Path]:
        """Yield the files whose appearance completes a checkpoint of this rank."""
        return own_directory(self._node_dir(self._node), self.site.rank).glob("region_*.json")

    def before_step(self) -> None:
        """Wait at the fence."""
        self._engine.before_step()
        self._has_stepped = True

    def load(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Read what recovery finds, from the tier that the candidate adds."""
        tier, versions, open_source = self._recovery()
        iteration += self.window - 1
        found = [v for v in versions if (v.rank, v.iteration) == (self.site.rank, iteration)]
        source = Source(tier=tier, version=found[0])
        left = Left(Readers(open_source), [source])
        left.look_at_all()
        transfer = OwnUnits(left, self._catalog)
        state: State = {}
        for unit in self._catalog.units:
            newest = max(transfer.versions(unit, Level.FULL, None))
            read = transfer.read(unit, Level.FULL, None, newest)
            tensors = self._stand_ins.state_of({str(unit): read})
            self.iteration_of |= dict.fromkeys(tensors, read.entry.iteration)
            state |= tensors
        return state

    def _recovery(self) -> tuple[Tier, list[Version], Opener]:
        """Return the tier, what lies there, and what opens it."""
        node_dir = self._node_dir(self._node)
        versions = self._look_at(self._node, is_replica=False)
        return MEMORY, versions, lambda source: MemoryReader(node_dir / source.version.path)

    def _look_at(self, node: str, *, is_replica: bool) -> list[Version]:
        found = look_at_memory(self._node_dir(node), node, self._stand_ins.JOB_ID)
        return [each for each in found.versions if each.is_replica == is_replica]

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


class MoeFtPeer(MoeFtMemory):
    """Two nodes, of which each keeps the other's replica, sent over TCP."""

    complete_means = "RAM x 2"
    replication_factor = 1

    @property
    def _holder(self) -> int:
        """The rank that keeps this one's replicas."""
        return (self.site.rank + 1) % self.site.num_ranks

    def _commits(self) -> Iterator[Path]:
        node_dir = self._node_dir(self._nodes[self._holder])
        return replica_directory(node_dir, self.site.rank, self._holder).glob("region_*.json")

    def _recovery(self) -> tuple[Tier, list[Version], Opener]:
        versions = self._look_at(self._nodes[self._holder], is_replica=True)
        address = self._topology.ranks[self._holder].address
        assert address is not None
        connection = PeerConnection(address, self._token)
        return PEER, versions, lambda source: PeerReader(connection, source.version)


class MoeFtStorage(MoeFtMemory):
    """Three regions per rank; a process of low priority writes every snapshot to disk."""

    complete_means = "fsync"
    persists = True

    def _commits(self) -> Iterator[Path]:
        return self._persist_dir.glob("iter_*/manifest.json")

    def _recovery(self) -> tuple[Tier, list[Version], Opener]:
        storage = Storage(str(self._persist_dir))
        versions = look_at_storage(storage).versions
        return STORAGE, versions, lambda source: StorageReader.open(storage, source.version)


class MoeFtSparse(MoeFtStorage):
    """Windows of snapshots with all weights, and a part of the masters and moments in each."""

    window = 3

    def _strategy(self, agreement: Agreement) -> Strategy:
        sizes = {
            unit: (
                self._catalog.num_bytes(unit, alignment=ALIGNMENT_BYTES),
                self._catalog.num_bytes(unit, Level.COMPUTE, alignment=ALIGNMENT_BYTES),
            )
            for unit in self._catalog.units
        }
        ranks = agreement.gather(RankUnits(ep_rank=0, sizes=sizes), _UNITS)
        layers = [self._stand_ins.LAYER]
        return SparseStrategy(self.site.rank, ranks, layers, SparseConfig(window=str(self.window)))


class MoeFtPartial(MoeFtStorage):
    """Snapshots and checkpoints with a third of the experts each, in turn."""

    def _strategy(self, agreement: Agreement) -> Strategy:
        units = self._catalog.units
        k = math.ceil(len(units) / 3)
        return PartialStrategy(
            [],
            units,
            [self._stand_ins.LAYER],
            ExpertLayout(num_layers=1, num_experts=len(units), ep_size=1),
            PartialConfig(k_snapshot=str(k), k_persist=k),
            PlannedRun(interval=1, planned_tokens=1, tokens_per_iteration=1),
            RankShare(always_bytes=0, unit_bytes=max(map(self._catalog.num_bytes, units))),
        )


OURS: dict[str, type[Candidate]] = {
    "moe_ft (memory)": MoeFtMemory,
    "moe_ft (memory + peer)": MoeFtPeer,
    "moe_ft (memory + storage)": MoeFtStorage,
    "moe_ft sparse (memory + storage)": MoeFtSparse,
    "moe_ft partial (memory + storage)": MoeFtPartial,
}
