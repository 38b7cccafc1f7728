"""The checkpoint engine: begins snapshots, completes them and has them written, at the seams of the loop.

It does not know which strategy it runs. The training thread calls the methods at the seams;
engine/snapshots/windows.py decides which memory a snapshot fills, engine/snapshots/writer.py copies,
engine/links/peers.py sends, engine/persist/client.py has it written. engine/build.py makes all parts.

All ranks decide together whether a window of snapshots begins, is complete or goes to storage. A failure
that can hit one rank alone costs it a snapshot or a checkpoint, which then fails on all ranks. A failure in
what must come out the same on all ranks ends checkpointing until the next start (engine/decisions.py).
Neither ends training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.agreement import StageSum
from moe_ft.engine.background import BackgroundPart, EngineEvent, Messages, PhaseHook
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.engine.breakpoints import Breakpoints, Moment
from moe_ft.engine.clock import Clock
from moe_ft.engine.decisions import Decisions, EndVote, Votes
from moe_ft.engine.ending import Ending, LastState, LastSteps
from moe_ft.engine.links.peers import OutgoingReplica
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.memory.restored import Handover, replica_to_send
from moe_ft.engine.persist.client import WriterSupervisor, persist_deadline_s
from moe_ft.engine.persist.requests import WriterSettings
from moe_ft.engine.persist.schedule import StorageSchedule
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.engine.snapshots.profile import FixedInterval, SnapshotProfile, Stall
from moe_ft.engine.snapshots.windows import Windows
from moe_ft.engine.snapshots.writer import SnapshotWriter
from moe_ft.errors import PinError
from moe_ft.files.progress import waiting
from moe_ft.format.entries import ModelPlaces
from moe_ft.format.identity import Identity
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.experts import Counts
from moe_ft.planning.lost_tokens import Debts
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.record import CapturedRecord
from moe_ft.strategies.interface import Strategy
from moe_ft.topology import RankInfo, Topology

_CLOSE_DEADLINE_S = 5.0
_DOES_NOT_FIT = "what was recovered does not fit this start's regions; peers get the next state"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineContext:
    """Facts about the engine's rank and job.

    Attributes:
        origins: checksums, by unit name, of the rotating units' weights in the run's first state.
        record_settings: for the boundary log, see `BoundaryIndex`.
        writer: settings of the node's writer process; None on all but the lowest rank of a node
            and without storage.
        storage_trouble: why the persist directory cannot be used when the start begins; empty if it can be.
        halves_peers: whether a window goes to one half of the peers after the other, see links/sender.py.
    """

    rank: int
    topology: Topology
    identity: Identity
    parameters: Sequence[LocalParameter]
    model_places: ModelPlaces
    memory: RankMemory
    origins: Mapping[str, str]
    stage_load: StageSum | None
    peers: tuple[RankInfo, ...]
    server: PeerServer
    token: str
    writer: WriterSettings | None
    phase_hook: PhaseHook
    breakpoint: FileLayout | None = None
    traffic: PipelineTraffic | None = None
    record_settings: Mapping[str, Any] = field(default_factory=dict)
    storage_trouble: str = ""
    halves_peers: bool = False

    @property
    def is_on_gpu(self) -> bool:
        """True if any parameter of the rank is on a GPU."""
        return any(each.parameter.is_cuda for each in self.parameters)

    @property
    def persist_dir(self) -> Path:
        """The directory of requests to the node's writer, and of its results."""
        return self.memory.node_dir / "persist"


class CheckpointEngine:
    """Takes snapshots of one rank. Owned by the training thread."""

    def __init__(
        self,
        config: MoeFtConfig,
        context: EngineContext,
        strategy: Strategy,
        *,
        clock: Clock,
        messages: Messages,
        decisions: Decisions,
        interval: FixedInterval,
        writer: SnapshotWriter,
        windows: Windows,
        storage: StorageSchedule,
        supervisor: WriterSupervisor | None,
        boundary: BoundaryLog | None,
        breakpoints: Breakpoints | None = None,
    ) -> None:
        self._config = config
        self._context = context
        self._strategy = strategy
        self._memory = context.memory
        self._clock = clock
        self._messages = messages
        self._reports = messages.reports
        self._decisions = decisions
        self._interval = interval
        self._profile = SnapshotProfile()
        self._stall = Stall(clock)
        self._writer = writer
        self._windows = windows
        self._gradients = writer.gradients
        self._storage = storage
        self._supervisor = supervisor
        self.breakpoints = breakpoints
        self.boundary = boundary
        self.wait_for_copy = partial(windows.wait_for_copy, clock)  # until nothing reads weights
        self._has_removed_left_overs = False
        self._restored_replica: OutgoingReplica | None = None
        self._forward_start_s: float | None = None
        self._start_iteration = self._iteration = 0
        self._outcome_without_training = LastState.NOTHING_NEW

    @property
    def debts(self) -> Debts | None:
        """Tokens that experts are to get above their capacity; None without a boost, or agreement on it."""
        return None if self._decisions.is_off else self._strategy.debts

    def start(self, iteration: int, restored: Handover | None) -> None:
        """Open memory, accept replicas, start workers and the writer; raises OSError or PinError."""
        context = self._context
        self._memory.open((restored.start, restored.iteration) if restored else None)
        self._pin_or_touch(iteration)
        self._start_iteration = self._iteration = iteration
        kept = self._windows.start(iteration, restored)
        is_in_use = restored is not None and restored.needs_breakpoint
        if self.boundary is not None:
            # After a fresh start nothing can be replayed from the first iteration: it has no state.
            keep_from = restored.replay_from if restored else iteration + 1
            self.boundary.start(iteration, keep_from, is_in_use=is_in_use)
        context.server.keep(self._memory.replicas, self._reports, self._memory.parity_store())
        self._writer.start()
        if restored is not None:
            self._outcome_without_training = (
                LastState.SAVED if restored.is_on_storage else LastState.UNSAVED
            )
            self._restored_replica = replica_to_send(kept, restored)
            if restored.peers_without and self._restored_replica is None:
                self._reports.skipped(BackgroundPart.REPLICATE, iteration, _DOES_NOT_FIT)
        if self._config.storage.persists:
            self._storage.start(restored.persisted_index if restored else "", iteration)
        if context.storage_trouble:
            self._reports.degraded(BackgroundPart.PERSIST, iteration, context.storage_trouble)
        if self._supervisor is not None:
            self._supervisor.start()
        if self.breakpoints is not None:
            self.breakpoints.start(is_in_use=is_in_use)

    def _pin_or_touch(self, iteration: int) -> None:
        """Pin the rank's memory; if CUDA refuses, report that, or raise PinError where it must not."""
        try:
            if self._context.is_on_gpu:
                self._memory.pin()
        except PinError as error:
            if self._config.memory.pin == "require":
                raise
            reason = f"--moe-ft-pin=try: snapshots take longer and training waits for them: {error}"
            self._reports.degraded(BackgroundPart.MEMORY, iteration, reason)
        self._memory.mappings.touch_later()  # what is not pinned

    def protect(self) -> None:
        """Send what was recovered to peers that lack it, once all ranks have started and accept replicas."""
        if self._restored_replica is not None:
            self._writer.send(self._restored_replica)
            self._restored_replica = None

    def before_step(self, tokens_per_expert: torch.Tensor | None = None) -> None:
        """Wait until nothing reads weights and moments any longer: the fence.

        Called by all ranks before the optimizer step of every iteration, with the ``[layer, expert]`` tokens
        that this rank has counted in it.
        """
        if self._forward_start_s is not None:
            self._profile.note_forward_backward(self._clock.perf_counter() - self._forward_start_s)
            self._forward_start_s = None
        with self._stall.counting():
            self._decisions.begin_count(tokens_per_expert, self._iteration)
            self.wait_for_copy()
        self._decisions.begin(self._votes, self._iteration)

    def note_reduced_gradients(self, iteration: int) -> None:
        """Note that gradients are reduced, before they are scaled and clipped; they lead to an iteration."""
        if self._gradients is not None:
            self._gradients.note_reduced(iteration, self._strategy.followed)

    def note_final_gradients(self, iteration: int, grad_norm: float | None) -> None:
        """Keep what the optimizer step that begins now gets, for peers; it leads to an iteration."""
        if self._gradients is not None:
            with (
                self._stall.counting(),
                self._reports.catching(BackgroundPart.REPLICATE, iteration),
            ):
                self._gradients.capture(iteration, grad_norm)

    def moment(self, record: CapturedRecord) -> Moment:
        """Return the live state as a breakpoint can be written of it: the optimizer has stepped."""
        assert self.breakpoints is not None
        return Moment(
            record=record,
            plan=self._strategy.plan_breakpoint(),
            tokens=self._decisions.pending_tokens(),
            ready=self.breakpoints.mark_ready(),
        )

    def _votes(self, turn: EndVote = EndVote.TRY) -> Votes:
        window = self._windows.open
        self._strategy.note_measured(self._profile.measured)
        return Votes(
            state=self._windows.state,
            is_ready=self._windows.has_room and self._writer.may_go_on,
            is_idle=self._storage.is_idle,
            can_persist=not self._storage.has_failed,
            is_protected=window is None or window.is_protected,
            can_grow=window is None or not window.has_failed,
            turn=turn,
            strategy=tuple(self._strategy.values()),
            interval=self._interval.values(),
        )

    def end_iteration(
        self, iteration: int, iteration_s: float, capture: Callable[[], CapturedRecord]
    ) -> float:
        """Read what was agreed, then start what is due. Called when the optimizer has stepped.

        Returns the seconds for which training stood still in this iteration: to copy its counts to the CPU,
        at the fence, and to copy the record of its state, which `capture` takes if a snapshot starts.
        """
        if not self._decisions.is_under_way:  # a skipped step has no fence
            self.before_step()
        self._iteration = iteration
        decided = self._decisions.read(iteration)
        if decided is not None:
            counted = partial(self._stall.count, capture)
            act = partial(self._act, *decided, iteration, iteration_s, counted)
            self._decisions.attempt(iteration, act)
        if self.breakpoints is not None:
            self.breakpoints.count_tokens(self._strategy.plan_breakpoint())
        self._forward_start_s = self._clock.perf_counter()
        return self._stall.take()

    def _act(
        self,
        votes: Votes,
        tokens: Counts | None,
        iteration: int,
        iteration_s: float,
        capture: Callable[[], CapturedRecord],
    ) -> None:
        if tokens is not None:
            self._strategy.add_tokens(tokens)
        self._profile.note_iteration(iteration_s - self._stall.seconds)
        is_busy = self._windows.open is not None or not self._storage.is_idle
        self._act_on(votes)
        self._tune(iteration, iteration_s, votes, is_busy=is_busy)
        complete = self._windows.complete
        if complete is not None and votes.is_idle and self._storage.wants(complete, iteration):
            with self._reports.catching(BackgroundPart.PERSIST, complete.iteration or 0):
                self._storage.submit(complete)
        # Only one that the writer takes at once: what waits may be replaced.
        is_writable = votes.is_idle and self._storage.is_idle
        is_whole = is_writable and self._storage.needs_whole(iteration)
        self._windows.announce = self._storage.announcer(is_writable, is_whole=is_whole)
        if self._windows.open is not None and self._windows.open.is_growing:
            self._windows.grow(iteration, capture, can_grow=votes.can_grow)
        elif self._is_due(iteration) or is_whole:
            if votes.state is SnapshotState.RUNNING or not votes.is_ready:
                reason = (
                    "the last one is not complete" if votes.is_ready else "all regions are in use"
                )
                self._reports.skipped(BackgroundPart.SNAPSHOT, iteration, reason)
            else:
                self._windows.begin(iteration, capture, is_whole=is_whole)
                if self.boundary is not None:
                    self.boundary.note_window(iteration)
                if is_whole:
                    self._storage.note_whole(iteration)

    def _tune(self, iteration: int, iteration_s: float, votes: Votes, *, is_busy: bool) -> None:
        if changes := self._strategy.agree([*votes.strategy]):
            self._reports.add("strategy", iteration, **changes)
        self._interval.end_iteration(iteration_s, is_busy=is_busy)
        if changes := self._interval.agree(votes.interval):
            self._reports.add("interval", iteration, **changes)

    def _is_due(self, iteration: int) -> bool:
        return 0 < self._interval.interval <= iteration - self._windows.last_iteration

    def _settle(self, votes: Votes) -> None:
        window = self._windows.settle(votes.state, is_protected=votes.is_protected)
        if window is None or window.last is None:
            return
        last = window.last
        if self.breakpoints is not None:
            self.breakpoints.release()
        self._strategy.note_complete(window.plan, last.iteration)
        if votes.is_protected and last.request.is_sent_to_peers:
            self._strategy.note_sent(window.plan)
        if risk := self._strategy.at_risk():
            self._reports.add("at_risk", self._iteration, tokens=dict(risk))
        if self.boundary is not None:
            self.boundary.keep(window.jobs[0].iteration)
        for job in window.jobs:
            job.measure(self._profile)
        if facts := window.facts():
            self._messages.tell_window(last.iteration, facts, self._profile, window.plan.hint)
        if votes.is_protected and not self._has_removed_left_overs:
            self._has_removed_left_overs = True
            with self._reports.catching(BackgroundPart.MEMORY, last.iteration):
                self._memory.remove_left_overs()
        self._storage.note_complete(last.iteration)
        if not self._storage.is_due:
            self._interval.end_checkpoint(last.complete_s)

    def _act_on(self, votes: Votes) -> bool | None:
        """Settle the window; return whether what was written is a checkpoint, None if that is not known."""
        self._settle(votes)
        is_confirmed = self._storage.confirm(are_idle=votes.is_idle, can_persist=votes.can_persist)
        with self._reports.catching(BackgroundPart.PERSIST, self._iteration):
            is_done = self._storage.poll(can_go_on=votes.can_persist)
            if is_done:
                self._interval.end_checkpoint(self._storage.seconds_per_snapshot)
        return is_confirmed

    def drain(self, log: Callable[[EngineEvent], None]) -> None:
        """Hand over the events since the last call; see `Messages.drain`."""
        self._messages.drain(log)

    def finish(
        self,
        iteration: int,
        capture: Callable[[], CapturedRecord],
        log: Callable[[EngineEvent], None],
        *,
        is_complete: bool,
    ) -> Ending:
        """Bring the last state to storage within a deadline. Called by all ranks.

        Without storage it is brought to memory, unless training `is_complete` and nothing continues from it.
        """
        self._iteration = iteration
        is_new = iteration != self._start_iteration
        outcome = LastState.UNSAVED if is_new else self._outcome_without_training
        if not self._config.storage.persists:
            outcome = LastState.NO_STORAGE
        is_for_memory = outcome is LastState.NO_STORAGE and is_new and not is_complete
        if outcome is LastState.UNSAVED or is_for_memory:
            parts = (self._strategy, self._decisions, self._windows, self._storage, self._reports)
            last = LastSteps(
                iteration, capture, *parts, self._votes, self._act_on, is_for_memory=is_for_memory
            )
            tell = partial(self._messages.drain, log, is_ending=True)
            num_ranks = len(self._context.topology.ranks)
            deadline_s = persist_deadline_s(self._memory.num_own_bytes, num_ranks)
            with waiting(deadline_s):
                is_kept = last.keep(tell, deadline_s, self._clock)
            if is_kept and not is_for_memory:
                outcome = LastState.SAVED
        self._messages.drain(log, is_ending=True)
        return Ending(
            iteration=iteration,
            outcome=outcome,
            newest_in_memory=self._newest_in_memory,
            is_agreed=not self._decisions.is_off,
            num_failed=self._windows.num_failed,
        )

    @property
    def _newest_in_memory(self) -> int | None:
        if self._windows.complete is not None:
            return self._windows.complete.iteration
        # What was recovered from storage may be nowhere else.
        is_in_memory = self._outcome_without_training is LastState.UNSAVED
        return self._start_iteration if is_in_memory else None

    def close(self) -> None:
        """End workers, connections and the writer process; then nothing uses the memory, whose files stay."""
        if self.breakpoints is not None:
            self.breakpoints.close()
        self._writer.close(_CLOSE_DEADLINE_S)
        if self.boundary is not None:
            self.boundary.close(_CLOSE_DEADLINE_S)
        if self._supervisor is not None:
            self._supervisor.close()
        self._context.server.close()
        self._memory.close()

    def remove_memory(self) -> None:
        """Remove this rank's memory; the run has ended cleanly."""
        self._memory.remove()
