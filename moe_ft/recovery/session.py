"""One incarnation's checkpointing on one rank: who is where, what is there, recover, run the engine.

The order is that of `Session.open`; each step has a file of its own. Everything that can be wrong with the
flags on this machine is found here, before the first iteration, and by all ranks together.
"""

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import torch.distributed as dist

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.addresses import own_host
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import PhaseHook, Report
from moe_ft.engine.context import EngineContext, EngineSettings
from moe_ft.engine.descriptors import allow_descriptors
from moe_ft.engine.ending import Outcome
from moe_ft.engine.engine import CheckpointEngine
from moe_ft.engine.memory import RankMemory
from moe_ft.engine.peer_server import PeerServer
from moe_ft.engine.persist_worker import WriterSettings
from moe_ft.engine.regions import node_directory
from moe_ft.engine.storage import Storage
from moe_ft.engine.storage_lock import StorageLock
from moe_ft.engine.unit_layouts import UnitLayouts
from moe_ft.errors import ConfigError, PlanError, SnapshotError, UnrecoverableError
from moe_ft.format.files import checksum
from moe_ft.planning.branches import number_of_next
from moe_ft.planning.placement import (
    default_replication_factor,
    place_replicas,
    sources_of,
)
from moe_ft.recovery.assembly import (
    build_strategy,
    ep_ranks_by_dp,
    measure_sizes,
    slice_assignment,
)
from moe_ft.recovery.attempts import Attempt, note_attempt
from moe_ft.recovery.choice import Wish
from moe_ft.recovery.handover import hand_over
from moe_ft.recovery.job import JobFacts, Recovery
from moe_ft.recovery.persist_directory import open_storage, release_lock, take_lock
from moe_ft.recovery.preflight import (
    Site,
    check_memory,
    claim_memory,
    make_room,
    say,
    warn_of_inexactness,
)
from moe_ft.recovery.recover import Recovered, Recoverer
from moe_ft.recovery.restarts import is_counted_restart, recall_launcher
from moe_ft.recovery.resuming import StartNames, make_identity, resume_strategy
from moe_ft.state import record as records
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter, local_parameters
from moe_ft.strategies.interface import Strategy
from moe_ft.strategies.registry import chosen
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
        self._catalog = UnitCatalog(
            self._parameters,
            leaves_out_frozen=chosen(config).leaves_out_frozen,
            packings=config.precision.packings,
        )
        self._layouts = UnitLayouts(self._catalog, facts.places.dp.rank)
        self._record_taker = records.RecordTaker(model, optimizer, scheduler, self._parameters)
        self._storage: Storage | None = None
        self._lock: StorageLock | None = None  # of the persist directory, on rank 0
        self._token = ""
        self._recoverer: Recoverer | None = None
        self._engine: CheckpointEngine | None = None
        self._may_lose_memory = False
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
            UnrecoverableError: if there is state and none of it is usable, or with --moe-ft-on-missing=fail
                nothing is there.
        """
        try:
            return self._open()
        except (ConfigError, UnrecoverableError):
            if self._lock is not None:  # nothing was written: no other job has to wait for this one
                release_lock(self._lock)
            raise

    def _open(self) -> Recovery:
        # Each rank for itself: the groups, by which all could speak, need the descriptors already.
        stage_size = self._facts.world_size // self._facts.groups.pp.size()
        allow_descriptors(self._facts.world_size, stage_size)
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
            recovery.start = number_of_next(recovered.starts)
            recovery.writer = recovered.plan.start.number
            recovery.sources = dict(recovered.fetched.sources)
            recovery.lossy = recovered.fetched.lossy
            if recovery.lossy and self._site.is_lowest_on_node:
                kept = ", ".join(f"{key} as {each}" for key, each in recovery.lossy.items())
                say(f"warning: what is recovered had been kept with {kept}: it is not exact")
            conversion = recovered.conversion
            recovery.conversion = conversion if conversion and conversion.num_replays else None
            recovery.loss = resume_strategy(self._strategy, recovered, self._stage, self._agreement)
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
        warn_of_inexactness(self._site, is_deterministic=self._facts.is_deterministic)
        self._alive = self._check_together(lambda: claim_memory(self._site))
        self._check_together(self._open_storage)
        self._check_together(lambda: check_memory(self._site, peers))
        self._memory = RankMemory(
            self._node_dir,
            self._facts.rank,
            self._topology,
            sources_of(peers, self._facts.rank),
            persists=self._config.storage.persists,
        )

    def _open_storage(self) -> None:
        self._storage, self._lock = open_storage(self._site)

    def _take_lock(self) -> None:
        """Take the lock of the persist directory from an earlier start of this job, on rank 0."""
        persists = self._config.storage.persists
        if self._storage is None or self._lock is not None or self._site.rank != 0 or not persists:
            return
        try:
            self._lock = take_lock(self._site, self._storage)
        except OSError as error:
            raise ConfigError(
                f"--moe-ft-persist-dir={self._storage.url}: its lock cannot be taken: {error}. Start again "
                "when storage answers, or name another directory."
            ) from error

    def _recover(self, origins: Mapping[str, str]) -> Recovered:
        wish = self._wish()
        self._recoverer = Recoverer(
            self._config.recovery,
            self._site,
            self._storage,
            self._memory,
            self._agreement,
            self._stage,
            self._fingerprint,
            self._facts.replay_settings,
            wish,
            self._token,
        )
        return self._recoverer.recover(
            self._catalog,
            self._strategy,
            origins,
            self._built,
            self._facts.groups,
            self._phase_hook,
        )

    def _wish(self) -> Wish:
        """Return what the flags ask for. Called by all ranks."""
        own = recall_launcher(self._node_dir, os.environ) if self._site.is_lowest_on_node else None
        everyone = self._agreement.gather((own, is_counted_restart(os.environ)))
        launchers = [launcher for launcher, _ in everyone if launcher is not None]
        recovery = self._config.recovery
        return Wish(
            recover_from=recovery.recover_from,
            only_iteration=recovery.only_iteration,
            is_restart=bool(launchers) or any(is_counted for _, is_counted in everyone),
            loaded_iteration=self._facts.iteration,
            began_with=self._facts.began_with,
            known_before=frozenset(name for each in launchers for name in each.known),
        )

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
        name = secrets.token_hex(4)
        # The time is for people: nothing is decided by it.
        names = StartNames(name=name, lineage=f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}")
        self._token, self._names = self._agreement.gather((secrets.token_hex(16), names))[0]
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
        places = self._agreement.gather((leader, facts.places.dp.rank, facts.experts.ep_rank))
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
        self._check_together(self._take_lock)
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
                kept = None if plan is None else (plan.start, iteration)
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
        config, rank = self._config, self._facts.rank
        writer = None
        if self._site.is_lowest_on_node and config.storage.persists:
            writer = WriterSettings(
                url=config.storage.persist_dir or "",
                keep=config.storage.keep,
                parent=os.getpid(),
                lock_owner=self._lock.owner if self._lock is not None else "",
            )
        return EngineContext(
            rank=rank,
            topology=self._topology,
            identity=make_identity(
                self._site, self._facts, recovered, self._names, self._fingerprint
            ),
            parameters=self._parameters,
            memory=self._memory,
            origins=origins,
            stage_load=self._stage if self._strategy.counted_layers else None,
            peers=peers,
            server=server,
            token=self._token,
            writer=writer,
            phase_hook=self._phase_hook,
        )

    def note_failure(self, failure: str) -> None:
        """Remember that continuing from what was recovered has failed in a way that speaks against it.

        Args:
            failure: where and how, equal for equal failures.
        """
        plan = None if self._recoverer is None else self._recoverer.tried
        if plan is None:
            return
        attempt = Attempt(
            start=plan.start.name,
            iteration=plan.iteration,
            failure=failure,
            by=self._names.name,
        )
        with suppress(OSError):  # a hint that is lost costs one more try
            note_attempt(self._node_dir, self._facts.rank, attempt)

    def capture(self, facts: records.IterationFacts) -> records.CapturedRecord:
        """Copy the record of the state as it is now. Training thread."""
        return self._record_taker.capture(facts)

    def finish(
        self,
        iteration: int,
        facts: records.IterationFacts,
        log: Callable[[Report], None],
        *,
        is_complete: bool,
    ) -> bool:
        """Training has ended: bring the last state to storage. Called by all ranks.

        Args:
            iteration: the last state's.
            facts: of it.
            log: gets what was reported.
            is_complete: whether training has reached its last iteration, rather than an --exit-* flag.

        Returns:
            False if the last state should be on storage and is not.
        """
        ending = self.engine.finish(iteration, lambda: self.capture(facts), log)
        self._may_lose_memory = ending.may_lose_memory(is_complete=is_complete)
        if ending.outcome is not Outcome.UNSAVED:
            return True
        if self._site.is_lowest_on_node:
            persist_dir = self._config.storage.persist_dir or ""
            say(ending.advice(persist_dir, str(self._node_dir), self._job_id))
        return False

    def close(self, *, is_clean: bool) -> None:
        """End the engine; after a clean end of all ranks also remove the job's memory.

        Memory stays while it has the only copy of the last state.

        Args:
            is_clean: whether training has ended as it should on this rank.
        """
        if self._engine is None:
            return
        self._engine.close()
        if self._lock is not None:
            self._lock.close()
        if is_clean and self._may_lose_memory:
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
        if self._lock is not None:
            release_lock(self._lock)
