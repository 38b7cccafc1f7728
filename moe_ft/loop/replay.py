"""Replay of logged iterations: their order, and what is put back between them.

The training loop runs forward, backward and the optimizer step, with the values that only the records hold,
and nothing else of an iteration: counters, learning rates and scales come from the records. After its window
a stage has none of its own for further iterations, so their schedulers step too. Turning the snapshots of a
window into a state is moe_ft/recovery/restore.py.
"""

from collections.abc import Callable, Collection, Sequence

from moe_ft.format.records import Counted, IterationRecord, JobNumbers, RandomStates
from moe_ft.loop.training_loop import LoopParts, RunAgain, TrainingLoop
from moe_ft.recovery.borders import Borders
from moe_ft.recovery.restore import Conversion
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.random_states import apply_rng, current_rng
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
        """Prepare a replay.

        Args:
            conversion: the window, whose first snapshot is restored.
            parameters: all of this rank.
            note: called with the iteration before each optimizer step.
            borders: what answers for the other stages, if only some replay.
            meet_before: called with each iteration before it is run again; may call collectives of the job.
        """
        self._conversion, self._parameters = conversion, list(parameters)
        self._borders, self._meet_before = borders, meet_before
        self._training, self._note = training, note

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
