"""One incarnation's checkpointing on one rank: who is where, what is there, recover, run the engine.

The order is that of `Session.open`; each step has a file of its own. Everything that can be wrong with the
flags on this machine is found here, before the first iteration, and by all ranks together.
"""

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import torch.distributed as dist

from moe_ft.config import MoeFtConfig
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import PhaseHook
from moe_ft.engine.context import EngineContext, EngineSettings
from moe_ft.engine.engine import CheckpointEngine
from moe_ft.engine.memory import RankMemory
from moe_ft.engine.peer_server import PeerServer
from moe_ft.engine.peers import own_host
from moe_ft.engine.persist import writer_command
from moe_ft.engine.regions import node_directory
from moe_ft.engine.storage import Storage
from moe_ft.engine.unit_layouts import UnitLayouts
from moe_ft.errors import ConfigError, PlanError, SnapshotError
from moe_ft.formats import Identity, checksum
from moe_ft.planning.partial import PartialStrategy
from moe_ft.planning.placement import (
    default_replication_factor,
    place_replicas,
    sources_of,
)
from moe_ft.planning.sparse import SparseStrategy
from moe_ft.planning.strategies import Strategy
from moe_ft.recovery.assembly import (
    build_strategy,
    division_of,
    ep_ranks_by_dp,
    measure_sizes,
    slice_assignment,
)
from moe_ft.recovery.handover import hand_over
from moe_ft.recovery.job import JobFacts, Recovery
from moe_ft.recovery.job_loss import JobLoss, add_up
from moe_ft.recovery.preflight import (
    Site,
    check_memory,
    claim_memory,
    make_room,
    open_storage,
    say,
)
from moe_ft.recovery.recover import Recovered, Recoverer
from moe_ft.recovery.rotating import by_expert, versions_in
from moe_ft.state import record as records
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter, local_parameters
from moe_ft.topology import RankInfo, Topology

# What else decides which slice of which parameter a rank has, such as the sizes of gradient buckets.
_CUTS = "cuts of the state (--overlap-grad-reduce, --ddp-bucket-size, --ddp-num-buckets, ...)"


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
        self._built = built
        model, optimizer, scheduler = built
        self._agreement, self._stage = Agreement(facts.timeout_s), StageSum(facts.timeout_s)
        self._job_id = config.memory.resolve_job_id(os.environ)
        self._node = config.memory.resolve_node_id(os.environ, socket.gethostname())
        self._node_dir = node_directory(config.memory.memory_dir, self._job_id, self._node)
        self._parameters = local_parameters(
            model, optimizer, facts.places, slice_assignment(config.strategy.sharding)
        )
        is_partial = config.strategy.strategy == "partial"
        self._catalog = UnitCatalog(
            self._parameters,
            leaves_out_frozen=is_partial,
            packings=config.precision.packings,
        )
        self._layouts = UnitLayouts(self._catalog, facts.places.dp.rank)
        self._record_taker = records.RecordTaker(model, optimizer, scheduler, self._parameters)
        self._replays = config.strategy.strategy == "sparse"
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
    def node_dir(self) -> Path:
        """This node's memory directory."""
        return self._node_dir

    @property
    def counted_layers(self) -> tuple[str, ...]:
        """The MoE layers whose tokens the engine wants to know, after `open`."""
        return self._strategy.counted_layers

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
        self._stage.start(self._agreement.gather(self._facts.stage), self._facts.rank)
        server = self._meet()
        peers = self._place()
        self._prepare(peers)
        rotating = sorted(self._strategy.rotating)
        origins = {} if self._strategy.saves_all else self._catalog.origins(rotating)
        recovered = self._recover(origins)
        recovery = Recovery(
            iteration=self._facts.iteration,
            is_deterministic=self._facts.is_deterministic,
            phases_s=recovered.phases_s,
            problems=recovered.problems,
        )
        if recovered.plan is not None:
            recovery.iteration, recovery.record = recovered.plan.iteration, recovered.record
            recovery.sources = dict(recovered.fetched.sources)
            recovery.lossy = recovered.fetched.lossy
            if recovery.lossy and self._site.is_lowest_on_node:
                kept = ", ".join(f"{key} as {each}" for key, each in recovery.lossy.items())
                say(f"warning: what is recovered had been kept with {kept}: it is not exact")
            conversion = recovered.conversion
            recovery.conversion = conversion if conversion and conversion.num_replays else None
            recovery.loss = self._resume_strategy(recovered)
        self._start_engine(recovered, origins, peers, server)
        return recovery

    def _prepare(self, peers: Sequence[tuple[int, ...]]) -> None:
        """Check this machine's directories, claim them, and open what the flags name."""
        self._site = Site(
            config=self._config,
            job_id=self._job_id,
            node=self._node,
            node_dir=self._node_dir,
            rank=self._facts.rank,
            topology=self._topology,
        )
        if self._replays and not self._facts.is_deterministic and self._site.rank == 0:
            say(
                "warning: without --deterministic-mode a recovery of --moe-ft-strategy sparse is consistent, "
                "but not bit for bit the run without the failure"
            )
        lossy = self._config.precision.lossy_parts
        if lossy and self._site.rank == 0:
            kept = ", ".join(f"{part} as {each}" for part, each in lossy.items())
            say(f"warning: snapshots keep {kept}: recoveries are not exact")
            if self._config.precision.is_ruinous:
                say(
                    "warning: without scales second moments in so few bits are mostly 0, and training "
                    "diverges behind a recovery: use bf16 or a block format for exp_avg_sq"
                )
        self._alive = self._check_together(lambda: claim_memory(self._site))
        self._storage = self._check_together(lambda: open_storage(self._site))
        self._check_together(lambda: check_memory(self._site, peers))
        self._memory = RankMemory(
            self._node_dir,
            self._facts.rank,
            self._topology,
            sources_of(peers, self._facts.rank),
            persists=self._config.storage.persists,
        )

    def _recover(self, origins: Mapping[str, str]) -> Recovered:
        recoverer = Recoverer(
            self._config.recovery,
            self._site,
            self._storage,
            self._memory,
            self._agreement,
            self._stage,
            self._fingerprint,
            self._facts.replay_settings,
            self._token,
        )
        return recoverer.recover(
            self._catalog,
            self._strategy,
            origins,
            self._built,
            self._facts.groups,
            self._phase_hook,
        )

    def _resume_strategy(self, recovered: Recovered) -> JobLoss | None:
        """Tell the strategy what was recovered; return what that cost. Called by all ranks."""
        strategy, index = self._strategy, recovered.fetched.index
        assert index is not None and recovered.plan is not None
        if isinstance(strategy, SparseStrategy):
            strategy.resume(index.window)
        if not isinstance(strategy, PartialStrategy):
            return None
        units = sorted(strategy.rotating)
        persisted = {}
        for found in self._stage.gather(versions_in(recovered.previous[1], units)):
            persisted.update(found)
        loss = strategy.resume(
            index.progress or strategy.nothing_counted(),
            recovered.plan.iteration,
            by_expert(recovered.rotating.versions),
            by_expert(persisted),
            recovered.rotating.gaps,
        )
        consumed_samples = index.records[-1].consumed_train_samples
        losses = self._agreement.gather(loss)
        return add_up(losses, strategy, self._facts.experts, consumed_samples)

    def _meet(self) -> PeerServer:
        """Exchange who is where; make the token that peers know each other by."""
        facts = self._facts
        self._strategy = self._check_together(self._build_strategy)
        sizes = measure_sizes(self._strategy, self._layouts)
        self._layouts.region_bytes = sizes.region_bytes
        server = PeerServer(self._node_dir, own_host(os.environ.get("MASTER_ADDR", "127.0.0.1")))
        server.start()
        info = RankInfo(
            rank=facts.rank,
            node=self._node,
            stage=facts.stage,
            pid=os.getpid(),
            address=server.address,
            region_bytes=sizes.region_bytes,
            slot_bytes=sizes.slot_bytes,
            num_slots=sizes.num_slots,
        )
        self._topology = Topology(ranks=tuple(self._agreement.gather(info)))
        self._token, self._new_lineage = self._agreement.gather(
            (secrets.token_hex(16), f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}")
        )[0]
        server.admit(self._token)
        # What the ranks divide among themselves may be divided otherwise: see recovery/gather.py.
        sharded = (each for each in self._parameters if each.is_sharded)
        cuts = checksum(repr([(each.name, each.start, each.end) for each in sharded]).encode())
        all_cuts = checksum("".join(self._agreement.gather(cuts)).encode())
        self._fingerprint = {**facts.fingerprint, _CUTS: all_cuts}
        return server

    @property
    def parameters(self) -> Sequence[LocalParameter]:
        """All parameters of this rank."""
        return self._parameters

    def _build_strategy(self) -> Strategy:
        facts, group = self._facts, self._facts.groups.dp_cp
        leader = dist.get_process_group_ranks(group)[0] if dist.is_initialized() else 0
        places = self._agreement.gather((leader, facts.places.dp.rank, facts.experts.ep.rank))
        return build_strategy(
            self._config,
            self._catalog,
            facts.experts,
            ep_ranks_by_dp(places, leader),
            self._stage.gather,
            facts.rank,
        )

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

    def _start_engine(
        self,
        recovered: Recovered,
        origins: Mapping[str, str],
        peers: Sequence[tuple[int, ...]],
        server: PeerServer,
    ) -> None:
        config, rank, plan = self._config, self._facts.rank, recovered.plan
        own_peers = tuple(self._topology.ranks[peer] for peer in peers[rank])
        context = self._context(recovered, origins, own_peers, server)
        settings = EngineSettings(
            interval=config.strategy.interval_iterations,
            overhead_limit=config.strategy.overhead_limit,
            persist_interval=config.storage.persist_interval if config.storage.persists else 0,
            raises=config.strategy.on_error == "raise",
            staging_bytes=config.precision.staging,
        )
        self._engine = CheckpointEngine(
            settings,
            context,
            self._strategy,
            self._agreement,
            self._layouts,
            self._record_taker.complete,
        )
        iteration = self._facts.iteration if plan is None else plan.iteration

        def start() -> None:
            try:
                kept = None if plan is None else (plan.lineage, iteration)
                make_room(self._site, peers, kept)
                restored = hand_over(recovered, self._strategy, self._node_dir, rank, own_peers)
                self.engine.start(iteration, restored)
            except (OSError, SnapshotError) as error:
                raise ConfigError(
                    f"--moe-ft-memory-dir={config.memory.memory_dir} cannot hold the regions of rank "
                    f"{rank} on node {self._node}: {error}. Enlarge its file system (mount -o "
                    "remount,size=...): what other ranks have left there is needed until a new "
                    "snapshot is complete."
                ) from error

        self._check_together(start)
        self.engine.protect()

    def _context(
        self,
        recovered: Recovered,
        origins: Mapping[str, str],
        peers: tuple[RankInfo, ...],
        server: PeerServer,
    ) -> EngineContext:
        """Return what the engine is given about this rank and the job."""
        config, rank, identity = self._config, self._facts.rank, self._identity(recovered)
        command = None
        if self._site.is_lowest_on_node and config.storage.persists:
            command = writer_command(
                self._node_dir / "persist",
                config.storage.persist_dir or "",
                config.storage.keep,
                os.getpid(),
                self._job_id,
                identity.lineage,
                renew_lock=rank == 0,
            )
        return EngineContext(
            rank=rank,
            topology=self._topology,
            identity=identity,
            parameters=self._parameters,
            memory=self._memory,
            origins=origins,
            stage_load=self._stage if self._strategy.counted_layers else None,
            peers=peers,
            server=server,
            token=self._token,
            writer_command=command,
            phase_hook=self._phase_hook,
        )

    def _identity(self, recovered: Recovered) -> Identity:
        plan = recovered.plan
        lineage, history = self._new_lineage, ((0, self._facts.iteration),)
        if plan is not None:
            lineage = plan.lineage
            history = (*plan.history, (plan.history[-1][0] + 1, plan.iteration))  # type: ignore[assignment]
        return Identity(
            job_id=self._job_id,
            lineage=lineage,
            history=history,
            fingerprint=self._fingerprint,
            world_size=self._facts.world_size,
            strategy=self._config.strategy.strategy,
            division=division_of(self._config),
            replay_settings=self._facts.replay_settings if self._replays else {},
            start=self._new_lineage,
        )

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
