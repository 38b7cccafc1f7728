"""Checkpointing of one start while training runs: the engine, what was recovered, and how it ends."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from moe_ft.engine.background import EngineEvent
from moe_ft.engine.ending import Ending
from moe_ft.engine.engine import CheckpointEngine
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.format.identity import Identity
from moe_ft.format.records import IterationRecord
from moe_ft.planning.recovery import Plan
from moe_ft.planning.tiers import Tier
from moe_ft.recovery.borders import Borders, Lockstep
from moe_ft.recovery.failures import (
    Attempt,
    describe,
    is_rejected,
    note_attempt,
    speaks_against_logs,
    speaks_against_state,
)
from moe_ft.recovery.meet import Met
from moe_ft.recovery.persist_directory import release_lock
from moe_ft.recovery.restore import Conversion, Restored
from moe_ft.saying import warn
from moe_ft.state.record import CapturedRecord, IterationFacts, step_ahead
from moe_ft.strategies.interface import JobLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryOutcome:
    """Report of a start about its recovery, on one rank.

    Attributes:
        record: of the recovered state; None if nothing was recovered.
        writer: number of the start that wrote the recovered state.
        blocked_by: reason why no newer state was reached, or no stage recovers alone; empty if neither is so.
        loss: cost of the recovery; None where every snapshot holds every unit.
        stages: pipeline stages that run iterations again alone; none in a global recovery.
        needed_bytes, read_bytes: bytes of this rank's part of the state, and by node (or "storage") those
            that it has read for it.
        lossy: formats of this rank's tensors that were kept in fewer bits than they have, by tensor key.
    """

    iteration: int
    start: int
    is_deterministic: bool
    phases_s: Mapping[str, float]
    problems: Sequence[str]
    record: IterationRecord | None = None
    writer: int = 0
    sources: Mapping[Tier, int]
    loss: JobLoss | None = None
    stages: Sequence[int] = ()
    lossy: Mapping[str, str]
    needed_bytes: int = 0
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    blocked_by: str = ""


def make_outcome(
    met: Met,
    restored: Restored | None,
    identity: Identity,
    phases_s: Mapping[str, float],
    problems: Sequence[str],
    blocked_by: str = "",
) -> RecoveryOutcome:
    """Return the outcome of a start."""
    return RecoveryOutcome(
        iteration=met.facts.iteration if restored is None else restored.plan.iteration,
        start=identity.start.number,
        is_deterministic=met.facts.is_deterministic,
        phases_s=phases_s,
        problems=problems,
        record=None if restored is None else restored.record,
        writer=0 if restored is None else restored.plan.start.number,
        sources={} if restored is None else dict(restored.fetched.sources),
        loss=None if restored is None else restored.loss,
        stages=() if restored is None else restored.plan.stages_alone,
        lossy={} if restored is None else restored.fetched.lossy,
        needed_bytes=0 if restored is None else restored.fetched.needed_bytes,
        read_bytes={} if restored is None else restored.fetched.read_bytes,
        blocked_by=blocked_by,
    )


@dataclass(kw_only=True, slots=True)
class Checkpointing:
    """A start that has recovered and takes checkpoints. Owned by the training thread.

    Attributes:
        lock: lock of the persist directory, on rank 0.
        plan: the state that was recovered; None if nothing was.
        borders: answers to a replay by some stages alone; None if there is none, or if all take part.
        lockstep: meetings while some stages run iterations again alone.
        opened: closes everything that the start has opened.
    """

    met: Met
    engine: CheckpointEngine
    lock: StorageLock | None
    plan: Plan | None
    outcome: RecoveryOutcome
    opened: ExitStack
    lockstep: Lockstep
    _replay: Conversion | None
    borders: Borders | None = None

    @property
    def is_local(self) -> bool:
        """True if some stages run iterations again alone; the others wait for them."""
        return self.plan is not None and self.plan.is_local

    def meet_before(self, iteration: int) -> None:
        """Let ranks that wait know that this one is about to run an iteration again; see `Lockstep`."""
        self.lockstep.before(iteration)

    def wait_for_all(self) -> None:
        """Wait until every stage has the state of the target. Called by all ranks after a local recovery.

        Raises:
            RuntimeError: if a rank makes no progress for the timeout of the job's groups, or has died.
        """
        if self.borders is not None:
            self.borders.close()
        self.lockstep.end()

    def take_replay(self) -> Conversion | None:
        """Return the window whose iterations must be run again before training continues, if there is one.

        It holds all that was fetched, so it is given away once.
        """
        replay, self._replay = self._replay, None
        return replay

    def capture(self, facts: IterationFacts) -> CapturedRecord:
        """Copy the record of the state as it is now."""
        return self.met.live.records.capture(facts)

    def capture_ahead(self, facts: IterationFacts, increment: int) -> CapturedRecord:
        """Copy the record of the state as it will be when the scheduler has stepped."""
        captured = self.capture(facts)
        step_ahead(captured, self.met.live.built[2], increment)
        return captured

    def note_failure(self, where: str, error: Exception) -> None:
        """Remember that continuing from the recovered state has failed; see `note_failure`."""
        if self.plan is not None:
            note_failure(self.met, self.plan, where, error)

    def finish(
        self,
        iteration: int,
        facts: IterationFacts,
        log: Callable[[EngineEvent], None],
        *,
        is_complete: bool,
    ) -> Ending:
        """Bring the last state to storage; training has ended. Called by all ranks."""
        ending = self.engine.finish(
            iteration, lambda: self.capture(facts), log, is_complete=is_complete
        )
        site = self.met.site
        if not ending.is_saved and site.is_lowest_on_node:
            persist_dir = site.config.storage.persist_dir or ""
            warn(ending.advice(persist_dir, str(site.node_dir), site.job_id))
        elif not is_complete and site.rank == 0 and (loss := ending.loss_without_storage()):
            warn(loss)
        if site.is_lowest_on_node and (lack := ending.lack_of_protection(site.node_dir)):
            warn(lack)
        return ending

    def have_all_ended(self) -> bool:
        """Return whether the run has ended cleanly on all ranks. Called by all ranks where it has."""
        try:
            self.met.ranks.everyone.barrier()
        except RuntimeError as error:
            rank = self.met.site.rank
            warn(f"rank {rank} keeps its memory: another rank did not end cleanly: {error}")
            return False
        return True

    def close(self, *, removes_memory: bool = False) -> None:
        """End checkpointing, close everything in reverse order, and remove memory that no rank needs."""
        with self.opened:
            self.engine.close()
            if removes_memory:
                self.engine.remove_memory()
                if self.lock is not None:
                    release_lock(self.lock)


@contextmanager
def noting_failures(met: Met, plan: Plan | None) -> Iterator[None]:
    """Note an exception as a failure of the recovery from a state; None if nothing is recovered."""
    try:
        yield
    except Exception as error:
        if plan is not None:
            note_failure(met, plan, "recovery", error)
        raise


def note_failure(met: Met, plan: Plan, where: str, error: Exception) -> None:
    """Remember that continuing from a state has failed, if the failure speaks against the state.

    After two starts that have failed from there in the same way the state is passed over. A recovery of some
    stages alone is, after one start in which it has failed for its logs. `where` is equal for equal failures.
    """
    is_local = plan.is_local and speaks_against_logs(error)
    if not (is_local or speaks_against_state(error)):
        return
    # Megatron's words name the rank and the node, which may be others the next time.
    what = "a rejected result" if is_rejected(error) else describe(error)
    attempt = Attempt(
        start=plan.start.name,
        iteration=plan.iteration,
        failure=f"{where}: {what}",
        by=met.names.name,
        is_local=is_local,
    )
    with suppress(OSError):  # a hint that is lost costs one more try
        note_attempt(met.site.node_dir, met.site.rank, attempt)
