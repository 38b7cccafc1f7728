"""The checkpoint engine: begins snapshots, completes them and has them written, at the seams of the loop.

It does not know which strategy it runs. The training thread calls the methods at the seams;
engine/snapshots/windows.py decides which memory a snapshot fills, engine/snapshots/writer.py copies,
engine/links/peers.py sends, engine/persist/client.py has it written. engine/build.py makes all parts.

All ranks decide together whether a window of snapshots begins, is complete or goes to storage. A failure
that can hit one rank alone costs it a snapshot or a checkpoint, which then fails on all ranks. A failure in
what must come out the same on all ranks ends checkpointing until the next start (engine/decisions.py).
Neither ends training.
"""

from collections.abc import Callable
from functools import partial

import torch

from moe_ft.engine.background import BackgroundPart, Report
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.engine.breakpoints import Breakpoints, Moment
from moe_ft.engine.clock import Clock
from moe_ft.engine.context import EngineContext, EngineSettings, Handover
from moe_ft.engine.decisions import Decisions, Turn, Votes
from moe_ft.engine.ending import Ending, LastState, Progress, keep_last_state
from moe_ft.engine.links.peers import Replica
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.memory.restored import replica_to_send
from moe_ft.engine.messages import Messages
from moe_ft.engine.persist.client import WriterSupervisor, persist_deadline_s
from moe_ft.engine.persist.schedule import StorageSchedule
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.engine.snapshots.profile import FixedInterval, SnapshotProfile
from moe_ft.engine.snapshots.stall import Stall
from moe_ft.engine.snapshots.windows import Windows
from moe_ft.engine.snapshots.writer import SnapshotWriter
from moe_ft.files.patience import waiting
from moe_ft.planning.experts import Counts
from moe_ft.state.record import CapturedRecord
from moe_ft.strategies.interface import Strategy

FENCE_DEADLINE_S = 120.0
_CLOSE_DEADLINE_S = 5.0


class CheckpointEngine:
    """Takes snapshots of one rank. Owned by the training thread.

    Attributes:
        breakpoints: the rank's breakpoint; None without one.
        boundary: logs the sends of the pipeline, None without that.
    """

    def __init__(
        self,
        settings: EngineSettings,
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
        self._settings, self._context, self._strategy = settings, context, strategy
        self._memory, self._clock = context.memory, clock
        self._messages, self._reports = messages, messages.reports
        self._decisions, self._interval = decisions, interval
        self._profile, self._stall = SnapshotProfile(), Stall(clock)
        self._writer, self._windows = writer, windows
        self._storage, self._supervisor = storage, supervisor
        self.breakpoints = breakpoints
        self.boundary = boundary
        self._has_removed_left_overs = False
        self._restored_replica: Replica | None = None
        self._forward_start_s: float | None = None
        self._start_iteration = self._iteration = 0
        self._outcome_without_training = LastState.NOTHING_NEW

    def start(self, iteration: int, restored: Handover | None) -> None:
        """Open memory, accept replicas, and start the workers and the writer.

        Args:
            restored: what was recovered; None after a fresh start: every region may then be overwritten.

        Raises:
            OSError: if the memory directory cannot be made or has no room.
        """
        context = self._context
        self._memory.open((restored.start, restored.iteration) if restored else None)
        if context.is_on_gpu:
            self._memory.pin()
        self._start_iteration = self._iteration = iteration
        if restored is not None:
            self._outcome_without_training = (
                LastState.SAVED if restored.is_on_storage else LastState.UNSAVED
            )
        self._windows.start(iteration, restored)
        if self.boundary is not None:
            # After a fresh start nothing can be replayed from the first iteration: it has no state.
            keep_from = restored.replay_from if restored else iteration + 1
            is_in_use = restored is not None and restored.needs_breakpoint
            self.boundary.start(iteration, keep_from, is_in_use=is_in_use)
        context.server.keep(self._memory.replicas, self._reports)
        self._writer.start()
        if restored is not None and restored.peers_without:
            self._restored_replica = replica_to_send(self._windows.retained, restored)
            if self._restored_replica is None:
                reason = (
                    "what was recovered does not fit this start's regions; peers get the next state"
                )
                self._reports.skipped(BackgroundPart.REPLICATE, iteration, reason)
        self._storage.start(restored.persisted_index if restored else "", iteration)
        if context.storage_trouble:
            self._reports.degraded(BackgroundPart.PERSIST, iteration, context.storage_trouble)
        if self._supervisor is not None:
            self._supervisor.start()
        if self.breakpoints is not None:
            is_in_use = restored is not None and restored.needs_breakpoint
            self.breakpoints.start(is_in_use=is_in_use)

    def protect(self) -> None:
        """Send what was recovered to peers that lack it, once all ranks have started and accept replicas."""
        if self._restored_replica is not None:
            self._writer.send(self._restored_replica)
            self._restored_replica = None

    def before_step(self, tokens_per_expert: torch.Tensor | None = None) -> None:
        """Wait until nothing reads weights and moments any longer: the fence.

        Called by all ranks before the optimizer step of every iteration.

        Args:
            tokens_per_expert: ``[layer, expert]`` counted on this rank in this iteration.
        """
        if self._forward_start_s is not None:
            self._profile.note_forward_backward(self._clock.perf_counter() - self._forward_start_s)
            self._forward_start_s = None
        with self._stall.counting():
            self._decisions.begin_count(tokens_per_expert, self._iteration)
            self._wait_for_copy()
        self._decisions.begin(self._votes, self._iteration)

    def moment(self, record: CapturedRecord) -> Moment:
        """Return the live state as a breakpoint can be written of it: the optimizer has stepped.

        Args:
            record: its record.
        """
        assert self.breakpoints is not None
        return Moment(
            record=record,
            plan=self._strategy.plan_breakpoint(),
            tokens=self._decisions.pending_tokens(),
            ready=self.breakpoints.mark_ready(),
        )

    def _wait_for_copy(self) -> None:
        job = self._windows.last_job
        if job is None or job.copied.is_set() or job.abandoned.is_set():
            return
        with waiting(FENCE_DEADLINE_S):
            if not self._clock.wait(job.copied, FENCE_DEADLINE_S):
                job.abandoned.set()

    def _votes(self, turn: Turn = Turn.TRY) -> Votes:
        window = self._windows.open
        self._strategy.note_measured(self._profile.copied_bytes, self._profile.flow_bytes)
        return Votes(
            state=self._windows.state,
            is_ready=self._windows.has_room,
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

        Args:
            iteration_s: the duration of the iteration.
            capture: takes the record of the state; called at once if a snapshot starts.

        Returns:
            The seconds for which training stood still in this iteration: to copy its counts to the CPU, at
            the fence, and to copy the record of its state.
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
        """Do what all ranks have decided."""
        if tokens is not None:
            self._strategy.add_tokens(tokens)
        self._profile.note_iteration(iteration_s - self._stall.seconds)
        is_busy = self._windows.open is not None or self._storage.is_busy
        self._settle(votes)
        self._poll_storage(votes)
        self._tune(iteration, iteration_s, votes, is_busy=is_busy)
        complete = self._windows.complete
        if complete is not None and votes.is_idle and self._storage.wants(complete, iteration):
            self._submit(complete)
        # Only one that the writer takes at once: what waits may be replaced.
        is_whole = self._storage.needs_whole(iteration) and not self._storage.is_busy
        is_whole &= votes.is_idle
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
        """Adapt the strategy and an automatic interval to what the slowest rank measured."""
        changes = self._strategy.agree([*votes.strategy])
        if changes:
            self._reports.add("strategy", iteration, **changes)
        self._interval.end_iteration(iteration_s, is_busy=is_busy)
        if (cost := self._interval.agree(votes.interval)) is not None:
            self._reports.add(
                "interval",
                iteration,
                interval=self._interval.interval,
                iteration_s=cost.iteration_s,
                overhead_s=cost.overhead_s,
                completion_s=cost.completion_s,
            )

    def _is_due(self, iteration: int) -> bool:
        interval = self._interval.interval
        return interval > 0 and iteration - self._windows.last_iteration >= interval

    def _settle(self, votes: Votes) -> None:
        """Act on the progress of the window on all ranks, and on whether all peers have it."""
        window = self._windows.settle(votes.state)
        if window is None or window.last is None:
            return
        last = window.last
        if self.breakpoints is not None:
            self.breakpoints.release()
        self._strategy.note_complete(window.plan, last.iteration)
        if self.boundary is not None:
            self.boundary.keep(window.jobs[0].iteration)
        for job in window.jobs:
            result = job.result.result()
            self._profile.note(
                job.request.num_bytes, result.copy_s, result.commit_s, job.replicate_s
            )
        if facts := window.facts():
            self._messages.tell_window(last.iteration, facts, self._profile, window.plan.hint)
        if votes.is_protected and not self._has_removed_left_overs:
            self._has_removed_left_overs = True
            with self._reports.catching(BackgroundPart.MEMORY, last.iteration):
                self._memory.remove_left_overs()
        self._storage.note_complete(last.iteration)
        if not self._storage.is_due:
            self._interval.end_checkpoint(last.complete_s)

    def _submit(self, region: Region, *, is_whole: bool = False) -> None:
        with self._reports.catching(BackgroundPart.PERSIST, region.iteration or 0):
            self._storage.submit(region, is_whole=is_whole)

    def _poll_storage(self, votes: Votes) -> bool | None:
        """Take back what was written; return whether it is a checkpoint, None if that is not known yet."""
        is_confirmed = self._storage.confirm(are_idle=votes.is_idle, can_persist=votes.can_persist)
        with self._reports.catching(BackgroundPart.PERSIST, self._iteration):
            is_done = self._storage.poll(self._windows.complete, can_go_on=votes.can_persist)
            if is_done:
                self._interval.end_checkpoint(self._storage.seconds_per_snapshot)
        return is_confirmed

    def drain(self, log: Callable[[Report], None]) -> None:
        """Hand over the events since the last call; see `Messages.drain`."""
        self._messages.drain(log)

    def finish(
        self,
        iteration: int,
        capture: Callable[[], CapturedRecord],
        log: Callable[[Report], None],
        *,
        is_complete: bool,
    ) -> Ending:
        """Bring the last state to storage within a deadline. Called by all ranks.

        Without storage it is brought to memory, unless nothing will continue from it.

        Args:
            capture: takes the record of the state.
            log: see `drain`; also called while this waits.
            is_complete: whether training has reached its last iteration.
        """
        self._iteration = iteration
        is_new = iteration != self._start_iteration
        outcome = LastState.UNSAVED if is_new else self._outcome_without_training
        if not self._settings.persists:
            outcome = LastState.NO_STORAGE
        is_for_memory = outcome is LastState.NO_STORAGE and is_new and not is_complete
        if outcome is LastState.UNSAVED or is_for_memory:
            is_kept = keep_last_state(
                partial(self._advance_at_end, iteration),
                partial(self._bring_last, iteration, capture),
                partial(self._messages.drain, log, is_ending=True),
                persist_deadline_s(self._memory.num_own_bytes, len(self._context.topology.ranks)),
                self._clock,
            )
            if not is_kept:
                where = "in memory" if is_for_memory else "on storage"
                reason = f"the last state is not {where}"
                self._reports.degraded(BackgroundPart.PERSIST, iteration, reason)
            elif outcome is LastState.UNSAVED:
                outcome = LastState.SAVED
        self._messages.drain(log, is_ending=True)
        return Ending(
            iteration=iteration,
            outcome=outcome,
            newest_in_memory=self._newest_in_memory,
            is_agreed=not self._decisions.is_off,
        )

    @property
    def _newest_in_memory(self) -> int | None:
        if self._windows.complete is not None:
            return self._windows.complete.iteration
        # What was recovered from storage may be nowhere else.
        is_in_memory = self._outcome_without_training is LastState.UNSAVED
        return self._start_iteration if is_in_memory else None

    def _advance_at_end(self, iteration: int, turn: Turn) -> Progress | None:
        """Tell all ranks this one's progress, and act on that of all."""
        window = self._windows.open
        if window is not None:
            window.is_given_up |= window.is_growing
        self._decisions.begin(partial(self._votes, turn), iteration)
        decided = self._decisions.read(iteration)
        if decided is None:
            return None
        is_try = window is not None and window.is_last  # not one that training's end has cut off
        progress = partial(self._progress_at_end, decided[0], iteration, is_try=is_try)
        return self._decisions.attempt(iteration, progress)

    def _progress_at_end(self, votes: Votes, iteration: int, *, is_try: bool) -> Progress:
        self._settle(votes)
        is_confirmed = self._poll_storage(votes)
        has_room = votes.is_ready or self._has_whole(iteration)
        has_window_failed = is_try and votes.state is SnapshotState.FAILED
        return Progress(
            turn=votes.turn,
            is_saved=self._is_kept(iteration),
            has_failed=is_confirmed is False or has_window_failed,
            is_idle=votes.is_idle and votes.state is not SnapshotState.RUNNING and has_room,
        )

    def _is_kept(self, iteration: int) -> bool:
        """Return whether the last state is where it is to be kept."""
        if self._settings.persists:
            return self._storage.is_at_end(iteration)
        return self._has_whole(iteration)

    def _has_whole(self, iteration: int) -> bool:
        """Return whether memory has all of the last state."""
        complete = self._windows.complete
        is_newest = complete is not None and complete.iteration == iteration
        return is_newest and self._strategy.is_whole(iteration)

    def _bring_last(self, iteration: int, capture: Callable[[], CapturedRecord]) -> None:
        """Begin the next step on the last state's way to where it is kept."""
        if self._has_whole(iteration):
            assert self._windows.complete is not None
            self._submit(self._windows.complete, is_whole=True)
        else:
            begin = partial(self._windows.begin, iteration, capture, is_last=True)
            self._decisions.attempt(iteration, begin)

    def close(self) -> None:
        """End workers, connections and the writer process. The memory stays."""
        if self.breakpoints is not None:
            self.breakpoints.close()
        self._writer.close(_CLOSE_DEADLINE_S)
        if self.boundary is not None:
            self.boundary.close(_CLOSE_DEADLINE_S)
        if self._supervisor is not None:
            self._supervisor.close()
        self._context.server.close()
        if self._context.is_on_gpu:
            self._memory.unpin()
        self._memory.close()

    def remove_memory(self) -> None:
        """Remove this rank's memory; the run has ended cleanly."""
        self._memory.remove()
