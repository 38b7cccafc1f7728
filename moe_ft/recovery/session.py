"""One incarnation's checkpointing on one rank: who is where, what is there, recover, run the engine.

The order is that of `Session.open`; each step has a file of its own. Everything that can be wrong with the
flags on this machine is found here, before the first iteration, and by all ranks together.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock

from moe_ft.config import MoeFtConfig
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.background import PhaseHook
from moe_ft.engine.engine import (
    CheckpointEngine,
    EngineContext,
    EngineSettings,
    num_regions,
)
from moe_ft.engine.layout import FileLayout, lay_out
from moe_ft.engine.peers import PeerConnection, PeerServer, own_host
from moe_ft.engine.persist import writer_command
from moe_ft.engine.regions import (
    Region,
    node_directory,
    own_directory,
)
from moe_ft.engine.storage import Storage
from moe_ft.errors import ConfigError, PlanError, SnapshotError, UnrecoverableError
from moe_ft.formats import Identity, IterationRecord, checksum, differing_settings
from moe_ft.planning.placement import (
    default_replication_factor,
    place_replicas,
    sources_of,
)
from moe_ft.planning.recovery import RecoveryPlan, Source, Tier, plan_recovery
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.planning.strategies import DenseStrategy, SnapshotPlan
from moe_ft.recovery.gather import gather_state
from moe_ft.recovery.inventory import Inventory, look_at_memory, look_at_storage
from moe_ft.recovery.preflight import (
    Site,
    check_memory,
    claim_memory,
    make_room,
    open_storage,
    say,
)
from moe_ft.recovery.restore import FetchedState, fetch, put_back
from moe_ft.recovery.sources import (
    MemoryReader,
    PeerReader,
    RegionReader,
    StateReader,
    StorageReader,
)
from moe_ft.state import record as records
from moe_ft.state.parameters import StatePlaces, local_parameters
from moe_ft.state.slices import describe
from moe_ft.topology import RankInfo, Topology
from moe_ft.units import Level, parse_unit

# What else decides which slice of which parameter a rank has, such as the sizes of gradient buckets.
_CUTS = "cuts of the state (--overlap-grad-reduce, --ddp-bucket-size, --ddp-num-buckets, ...)"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """What the training loop tells about the job and this rank.

    Attributes:
        stage: this rank's pipeline rank.
        places, groups: this rank's places, and Megatron's ProcessGroupCollection.
        fingerprint: the settings that state depends on, by flag.
        iteration: where training goes on if nothing is recovered (--load may have set it).
        is_deterministic: whether a replay computes the same bits.
        timeout_s: of the job's process groups.
    """

    rank: int
    world_size: int
    stage: int
    places: StatePlaces
    groups: Any
    fingerprint: dict[str, Any]
    iteration: int
    is_deterministic: bool
    timeout_s: float


@dataclass(kw_only=True, slots=True)
class Recovery:
    """What a start recovered, for the training loop and the event log.

    Attributes:
        iteration: where training goes on.
        record: the record of that state; None if nothing was recovered.
        sources: number of units by tier.
        phases_s: seconds by phase.
        problems: what was looked at and rejected, and why.
    """

    iteration: int
    record: IterationRecord | None = None
    sources: Mapping[Tier, int] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    is_deterministic: bool = True


class Session:
    """Owned by the training thread. `open` and `close` are called by all ranks."""

    def __init__(
        self,
        config: MoeFtConfig,
        facts: JobFacts,
        built: tuple[Any, Any, Any],
        phase_hook: PhaseHook,
    ) -> None:
        self._config, self._facts, self._phase_hook = config, facts, phase_hook
        self._model, self._optimizer, self._scheduler = built
        self._agreement = Agreement(facts.timeout_s)
        self._job_id = config.memory.resolve_job_id(os.environ)
        self._node = config.memory.resolve_node_id(os.environ, socket.gethostname())
        self._node_dir = node_directory(config.memory.memory_dir, self._job_id, self._node)
        self._parameters = local_parameters(
            self._model, self._optimizer, facts.places, assign_equal_slices
        )
        self._record_taker = records.RecordTaker(
            self._model, self._optimizer, self._scheduler, self._parameters
        )
        self._strategy = DenseStrategy(each.unit for each in self._parameters)
        self._storage: Storage | None = None
        self._token = ""
        self._engine: CheckpointEngine | None = None
        self._alive: filelock.BaseFileLock | None = None

    @property
    def engine(self) -> CheckpointEngine:
        """The engine, after `open`."""
        assert self._engine is not None
        return self._engine

    @property
    def topology(self) -> Topology:
        """Where all ranks are, after `open`."""
        return self._topology

    @property
    def _region_bytes(self) -> int:
        return self._topology.ranks[self._facts.rank].region_bytes

    @property
    def node_dir(self) -> Path:
        """This node's memory directory."""
        return self._node_dir

    def open(self) -> Recovery:
        """Find out who is where, recover what can be recovered, and start the engine.

        Returns:
            What was recovered; weights, moments, buffers and scalars are then in place. The caller
            sets the counters of the training loop, and the random numbers before the first iteration.

        Raises:
            ConfigError: if the flags do not fit this machine, or what is there is another model's.
            UnrecoverableError: with --moe-ft-on-missing=fail, if nothing is usable.
        """
        self._agreement.start()
        server = self._meet()
        peers = self._place()
        self._site = Site(
            config=self._config,
            job_id=self._job_id,
            node=self._node,
            node_dir=self._node_dir,
            rank=self._facts.rank,
            topology=self._topology,
        )
        self._alive = self._check_together(lambda: claim_memory(self._site))
        self._storage = self._check_together(lambda: open_storage(self._site))
        self._check_together(lambda: check_memory(self._site, peers))
        self._regions = [
            Region(own_directory(self._node_dir, self._facts.rank), number, self._region_bytes)
            for number in range(num_regions(persists=self._config.storage.persists))
        ]
        recovery, plan = self._recover()
        self._start_engine(recovery, plan, peers, server)
        return recovery

    def _meet(self) -> PeerServer:
        """Exchange who is where; make the token that peers know each other by."""
        server = PeerServer(self._node_dir, own_host(os.environ.get("MASTER_ADDR", "127.0.0.1")))
        server.start()
        layout = self._lay_out(self._strategy.plan(0))
        info = RankInfo(
            rank=self._facts.rank,
            node=self._node,
            stage=self._facts.stage,
            pid=os.getpid(),
            address=server.address,
            region_bytes=layout.num_bytes,
        )
        self._topology = Topology(ranks=tuple(self._agreement.gather(info)))
        self._token, self._new_lineage = self._agreement.gather(
            (secrets.token_hex(16), f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}")
        )[0]
        server.admit(self._token)
        cuts = checksum(
            repr([(each.name, each.start, each.end) for each in self._parameters]).encode()
        )
        all_cuts = checksum("".join(self._agreement.gather(cuts)).encode())
        self._fingerprint = {**self._facts.fingerprint, _CUTS: all_cuts}
        return server

    def _lay_out(self, plan: SnapshotPlan) -> FileLayout:
        tensors: dict[str, list[Any]] = {}
        levels = {str(unit): level for unit, level in plan.items()}
        for local in self._parameters:
            name = str(local.unit)
            if levels[name] is not Level.NONE:
                tensors.setdefault(name, []).extend(describe(local, levels[name]))
        return lay_out((parse_unit(name), levels[name], found) for name, found in tensors.items())

    def _check_together[Answer](self, check: Callable[[], Answer]) -> Answer:
        """Run a check on all ranks; if it fails on one, raise its ConfigError on all."""
        try:
            answer, problem = check(), ""
        except ConfigError as error:
            problem = str(error)
        problems = list(dict.fromkeys(each for each in self._agreement.gather(problem) if each))
        if problems:
            raise ConfigError(problems[0])
        return answer

    def _place(self) -> list[tuple[int, ...]]:
        num_nodes = len(self._topology.nodes)
        factor = self._config.memory.num_replicas
        if factor is None:
            factor = default_replication_factor(num_nodes)
        try:
            return place_replicas(self._topology, factor)
        except PlanError as error:
            raise ConfigError(
                f"--moe-ft-replication-factor={factor}: {error}. Lower it, or start more nodes."
            ) from error

    def _recover(self) -> tuple[Recovery, RecoveryPlan | None]:
        recovery = Recovery(
            iteration=self._facts.iteration, is_deterministic=self._facts.is_deterministic
        )
        if self._config.recovery.recover_from == "load":
            return recovery, None
        start = time.perf_counter()
        inventory = self._look()
        recovery.phases_s["inventory"] = time.perf_counter() - start
        self._check_identity(inventory)
        start = time.perf_counter()
        nodes = [info.node for info in self._topology.ranks]
        plans, rejected = plan_recovery(
            inventory.versions, nodes, self._config.recovery.only_iteration
        )
        recovery.phases_s["plan"] = time.perf_counter() - start
        recovery.problems = inventory.problems + rejected
        for plan in plans:
            start = time.perf_counter()
            fetched = fetch(plan.sources[self._facts.rank], self._parameters, self._open_source)
            recovery.problems += fetched.problems
            failures = [
                f"iteration {plan.iteration}: rank {rank} has no intact {', '.join(missing[:3])}"
                for rank, missing in enumerate(self._agreement.gather(self._missing(fetched)))
                if missing
            ]
            if not failures:
                self._put_back(fetched, plan)
                recovery.phases_s["restore"] = time.perf_counter() - start
                recovery.iteration, recovery.record = plan.iteration, fetched.record
                recovery.sources = dict(fetched.sources)
                return recovery, plan
            recovery.problems += failures
        if inventory.is_unreadable:
            raise UnrecoverableError(
                f"--moe-ft-persist-dir={self._config.storage.persist_dir} could not be read: "
                f"{'; '.join(inventory.problems)}. What is there may be the state to go on from: make it "
                "readable, or start without it with --moe-ft-recover-from load."
            )
        self._say_missing(recovery.problems)
        return recovery, None

    @staticmethod
    def _missing(fetched: FetchedState) -> list[str]:
        return [] if fetched.is_complete else [*fetched.missing, "record"][:4]

    def _look(self) -> Inventory:
        """Look at all nodes' memory and, once, at storage."""
        own, stored = Inventory(), Inventory()
        if self._site.is_lowest_on_node:
            own = look_at_memory(self._node_dir, self._node, self._job_id)
        if self._facts.rank == 0 and self._storage is not None:
            stored = look_at_storage(self._storage)
        inventory = Inventory()
        # Apart from the gather, which pads what every rank sends to the longest.
        for found in (*self._agreement.gather(own), self._agreement.broadcast(stored)):
            inventory.merge(found)
        return inventory

    def _check_identity(self, inventory: Inventory) -> None:
        """Raise ConfigError if what was found is the state of another model or layout."""
        for where, identity in inventory.identities:
            ours, theirs = self._fingerprint, identity.fingerprint
            differences = differing_settings(ours, theirs)
            if differences:
                raise ConfigError(
                    f"{where} holds the state of another model, layout or data: "
                    f"{'; '.join(differences[:5])}. Start with the settings of that run, name another "
                    "--moe-ft-persist-dir or --moe-ft-job-id, remove its memory with `python -m moe_ft "
                    "clean`, or ignore it with --moe-ft-recover-from load."
                )

    def _open_source(self, source: Source) -> StateReader:
        if source.tier is Tier.MEMORY:
            for region in self._regions:
                if self._node_dir / source.version.path == region.index_path and region.is_in_place:
                    return RegionReader(region)
            return MemoryReader(self._node_dir, source.version)
        if source.tier is Tier.STORAGE:
            assert self._storage is not None
            return StorageReader(self._storage, source.version)
        assert source.version.node is not None
        address = self._topology.lowest_on_node(source.version.node).address
        assert address is not None
        return PeerReader(PeerConnection(address, self._token), source.version)

    def _put_back(self, fetched: FetchedState, plan: RecoveryPlan) -> None:
        assert fetched.record is not None
        put_back(fetched, self._parameters, plan.iteration, self._phase_hook)
        gather_state(
            self._model, self._optimizer, self._parameters, self._facts.places, self._facts.groups
        )
        records.apply(
            fetched.record, self._model, self._optimizer, self._scheduler, self._parameters
        )

    def _say_missing(self, problems: Sequence[str]) -> None:
        """Say what was looked at; raise if the user wants that to be the end."""
        looked_at = f"the memory of job '{self._job_id}' on nodes {', '.join(self._topology.nodes)}"
        if self._storage is not None:
            looked_at += f" and {self._storage.url}"
        if problems and self._facts.rank == 0:
            say(f"nothing to recover from was found in {looked_at}:")
            for problem in problems:
                say(f"  {problem}")
        if self._config.recovery.on_missing == "fail":
            reasons = "; ".join(problems) or "it is empty"
            raise UnrecoverableError(
                f"--moe-ft-on-missing=fail: nothing to recover from in {looked_at}: {reasons}. Use "
                "--moe-ft-on-missing start to begin from --load or afresh."
            )

    def _start_engine(
        self,
        recovery: Recovery,
        plan: RecoveryPlan | None,
        peers: Sequence[tuple[int, ...]],
        server: PeerServer,
    ) -> None:
        config, rank, ranks = self._config, self._facts.rank, self._topology.ranks
        lineage, history = self._new_lineage, ((0, self._facts.iteration),)
        if plan is not None:
            lineage = plan.lineage
            history = (*plan.history, (plan.history[-1][0] + 1, plan.iteration))  # type: ignore[assignment]
        identity = Identity(
            job_id=self._job_id,
            lineage=lineage,
            history=history,
            fingerprint=self._fingerprint,
            world_size=self._facts.world_size,
            strategy=config.strategy.strategy,
        )
        command = None
        if self._site.is_lowest_on_node and config.storage.persists:
            command = writer_command(
                self._node_dir / "persist",
                config.storage.persist_dir or "",
                config.storage.keep,
                os.getpid(),
                self._job_id,
                lineage,
                renew_lock=rank == 0,
            )
        context = EngineContext(
            rank=rank,
            topology=self._topology,
            node_dir=self._node_dir,
            identity=identity,
            parameters=self._parameters,
            regions=self._regions,
            peers=tuple(ranks[peer] for peer in peers[rank]),
            sources=tuple(ranks[source] for source in sources_of(peers, rank)),
            server=server,
            token=self._token,
            writer_command=command,
            phase_hook=self._phase_hook,
        )
        settings = EngineSettings(
            interval=config.strategy.interval_iterations,
            overhead_limit=config.strategy.overhead_limit,
            persist_interval=config.storage.persist_interval if config.storage.persists else 0,
            raises=config.strategy.on_error == "raise",
        )
        self._engine = CheckpointEngine(
            settings,
            context,
            self._strategy,
            self._agreement,
            self._lay_out,
            self._record_taker.complete,
        )

        def start() -> None:
            try:
                restored = None if plan is None else (lineage, recovery.iteration)
                make_room(self._site, peers, restored)
                self.engine.start(recovery.iteration, is_restored=plan is not None)
            except (OSError, SnapshotError) as error:
                raise ConfigError(
                    f"--moe-ft-memory-dir={config.memory.memory_dir} cannot hold the regions of rank "
                    f"{rank} on node {self._node}: {error}. Enlarge its file system (mount -o "
                    "remount,size=...): what other ranks have left there is needed until a new "
                    "snapshot is complete."
                ) from error

        self._check_together(start)

    def capture(self, facts: records.IterationFacts) -> records.CapturedRecord:
        """Copy the record of the state as it is now. Training thread."""
        return self._record_taker.capture(facts)

    def finish(self, iteration: int, facts: records.IterationFacts) -> None:
        """Training has ended: bring the last state to storage. Called by all ranks."""
        self.engine.finish(iteration, lambda: self.capture(facts))

    def close(self, *, is_clean: bool) -> None:
        """End the engine; after a clean end of all ranks also remove the job's memory.

        Args:
            is_clean: whether training has ended as it should on this rank.
        """
        if self._engine is None:
            return
        self._engine.close()
        if is_clean:
            self._remove_memory(self._engine)
        if self._alive is not None:
            self._alive.release()

    def _remove_memory(self, engine: CheckpointEngine) -> None:
        try:
            self._agreement.barrier()
        except RuntimeError as error:
            say(
                f"rank {self._facts.rank} keeps its memory: another rank did not end cleanly: {error}"
            )
            return
        engine.remove_memory()
        if self._facts.rank == 0 and self._storage is not None and self._config.storage.persists:
            self._storage.release_lock(self._job_id)
