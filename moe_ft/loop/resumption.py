"""Rest of a recovery, which needs the running loop: replay, data position, random numbers; and its report.

checkpoints.py has restored weights and moments before. In a replay the training loop runs forward, backward
and the optimizer step, with the values that only the records hold, and nothing else of an iteration:
counters, learning rates and scales come from the records. After its window a stage has none of its own for
further iterations, so their schedulers step too. Turning the snapshots of a window into a state is
moe_ft/recovery/restore.py.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from moe_ft.faults import Phase
from moe_ft.format.records import Counted, IterationRecord, JobNumbers, RandomStates
from moe_ft.loop.listeners import LoopState
from moe_ft.loop.training_loop import LoopParts, RunAgain, TrainingLoop
from moe_ft.recovery.borders import Borders
from moe_ft.recovery.checkpointing import Checkpointing, RecoveryOutcome
from moe_ft.recovery.restore import Conversion
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.random_states import apply_rng, current_rng
from moe_ft.strategies.interface import JobLoss
from moe_ft.units import UnitId


class Replay:
    """One recovery's replay on one rank. Owned by the training thread; `run` is called by all ranks."""

    def __init__(
        self,
        conversion: Conversion,
        parameters: Collection[LocalParameter],
        training: TrainingLoop,
        note: Callable[[int], None],
        borders: Borders | None = None,
        meet_before: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        """Begin with a window whose first snapshot is restored.

        Args:
            note: called with the iteration before each optimizer step.
            borders: answer for the other stages, if only some replay.
            meet_before: called with each iteration before it is run again; may call collectives of the job.
        """
        self._conversion = conversion
        self._parameters = list(parameters)
        self._borders = borders
        self._meet_before = meet_before
        self._training = training
        self._note = note

    @property
    def first_record(self) -> IterationRecord:
        """Record of the state that the replay begins with."""
        return self._conversion.records[0]

    @property
    def last_record(self) -> Counted:
        """Counters of the state that the replay ends with."""
        return self._tail[-1] if self._tail else self._conversion.records[-1]

    @property
    def num_iterations(self) -> int:
        """Number of iterations to run again."""
        return self._conversion.num_replays + len(self._tail)

    @property
    def _tail(self) -> Sequence[JobNumbers]:
        return self._borders.tail if self._borders is not None else ()

    def run(self, loop: LoopParts) -> RandomStates:
        """Run the iterations again; return the random numbers of the state that this makes.

        The caller restores them, later. Iterations after the window have no record of this rank: they
        continue with the random numbers, buffers and scales that the one before has left.
        """
        records = self._conversion.records
        with self._training.replaying(loop, self._parameters, self._borders) as run_again:
            for position in range(self._conversion.num_replays):
                before, after = records[position : position + 2]
                apply_rng(before.rng)
                frozen = self._conversion.frozen_units(position)
                self._run_iteration(run_again, before, after, frozen)
                self._conversion.load(position + 1)
            return self._run_tail(run_again, records[-1])

    def _run_tail(self, run_again: RunAgain, last: IterationRecord) -> RandomStates:
        if not self._tail:
            return last.rng
        apply_rng(last.rng)
        before: Counted = last
        for after in self._tail:
            if self._run_iteration(run_again, before, after, frozenset()):
                self._conversion.step_scheduler(self._training.samples_ahead() or 0)
            before = after
        return current_rng()

    def _run_iteration(
        self, run_again: RunAgain, before: Counted, after: Counted, frozen: frozenset[UnitId]
    ) -> bool:
        """Run one iteration; return False if its step was skipped."""
        self._meet_before(before.iteration)
        player = None if self._borders is None else self._borders.player

        def before_step() -> None:
            if player is not None:
                player.end()
            self._note(before.iteration)

        if player is not None:
            player.begin(before.iteration)
        return run_again(before, after, frozen, before_step)


class Resumption:
    """Steps from a recovered state to the first iteration of the loop. Owned by the training thread.

    Attributes:
        is_due: whether iterations must be run again before the loop continues, here or on ranks to wait for.
    """

    def __init__(
        self,
        training: TrainingLoop,
        loop: LoopState,
        running: Checkpointing,
        note: Callable[[int], None],
    ) -> None:
        """Set the counters of the loop, from which the data iterators are built next.

        Args:
            note: called with each iteration that is run again, before its optimizer step.
        """
        record, window = running.outcome.record, running.take_replay()
        assert record is not None
        self._training = training
        self._loop = loop
        self._running = running
        self._replay: Replay | None = None
        if window is not None:
            parameters, meet_before = running.met.live.parameters, running.meet_before
            self._replay = Replay(window, parameters, training, note, running.borders, meet_before)
        self.is_due = self._replay is not None or running.is_local
        self._reached: Counted = record if self._replay is None else self._replay.last_record
        self._rng: RandomStates | None = record.rng  # until they are restored
        self._parts: LoopParts | None = None
        training.resume(self._reached)
        if self._replay is not None:
            # The data iterators begin with the batch that the replay reads first.
            training.set_data_position(self._replay.first_record.consumed_train_samples)
        loop.iteration = self._reached.iteration

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradients that have led to the state of the loop; None if they were not finite."""
        norm = self._reached.grad_norm
        return None if norm is None else float(norm)

    def begin_training(self, parts: LoopParts) -> None:
        """Set the data position of the loop: the data iterators exist."""
        self._parts = parts
        if self._rng is not None:
            self._training.set_data_position(self._reached.consumed_train_samples)

    def finish(self, forward_backward: Callable[..., Any] | None) -> tuple[int, dict[str, float]]:
        """Run what is due; return how many iterations this rank has run, and the seconds by phase.

        Called by all ranks; those with nothing to run wait for the others.
        """
        self.is_due = False
        running, num_replayed = self._running, 0
        if running.is_local:
            self._training.open_links(running.met.facts.groups.pp)
        phases_s, start_s = dict(running.outcome.phases_s), time.perf_counter()
        if self._replay is not None:
            num_replayed = self._run(self._replay, forward_backward)
            phases_s["replay"] = time.perf_counter() - start_s
        if running.is_local:
            start_s = time.perf_counter()
            running.wait_for_all()
            phases_s["wait"] = time.perf_counter() - start_s
        return num_replayed, phases_s

    def _run(self, replay: Replay, forward_backward: Callable[..., Any] | None) -> int:
        loop, parts = self._loop, self._parts
        assert parts is not None
        if forward_backward is not None:
            parts = replace(parts, forward_backward=forward_backward)
        loop.is_replaying, loop.phase = True, Phase.REPLAY
        self._rng = replay.run(parts)
        self._replay = None  # with all that was fetched for it
        self._training.resume(self._reached)
        loop.is_replaying, loop.phase = False, Phase.SETUP
        loop.iteration = self._reached.iteration
        return replay.num_iterations

    def restore_rng(self) -> None:
        """Restore the random numbers, once: nothing may draw any between this and the next forward pass."""
        if self._rng is not None:
            apply_rng(self._rng)
            self._rng = None


def continuation_of(outcome: RecoveryOutcome) -> str:
    """Return a line for people about a recovery; they have read before that ranks have died."""
    line = f"training continues after iteration {outcome.iteration}"
    if tiers := " and ".join(sorted(tier.name for tier in outcome.sources)):
        line += f", whose state comes from {tiers}"
    if outcome.stages:
        line += f"; stages that have run iterations again: {', '.join(map(str, outcome.stages))}"
    return line


def recovery_fields(outcome: RecoveryOutcome, num_replayed: int) -> dict[str, Any]:
    """Return the fields of the event "recovery", after the given number of replayed iterations."""
    return {
        "scope": "local" if outcome.stages else "global",
        "stages": list(outcome.stages),
        "reason": outcome.blocked_by,
        "target_iteration": outcome.iteration,
        "restored_iteration": outcome.iteration - num_replayed,
        "replayed_iterations": num_replayed,
        "start": outcome.start,
        "writer": outcome.writer,
        **(outcome.loss or JobLoss()).fields(),
        "sources": {tier.name: count for tier, count in outcome.sources.items()},
        "needed_bytes": outcome.needed_bytes,
        "read_bytes": dict(outcome.read_bytes),
        "phases_s": dict(outcome.phases_s),
        "deterministic": outcome.is_deterministic,
        "lossy": dict(outcome.lossy),
        "problems": list(outcome.problems),
    }
