"""Replays of a simulated rank: iterations run again, by all stages or by some alone.

It stands for megatron/fault_tolerance/seams/replay.py, and calls the same functions of moe_ft.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from moe_ft.format.records import Counted, IterationRecord
from moe_ft.recovery.borders import Borders
from moe_ft.recovery.restore import Conversion
from moe_ft.state.packed_values import from_json
from moe_ft.units import UnitId
from tests.simulation.links import Links
from tests.simulation.model import SAMPLES_PER_ITERATION, Model


class Replaying:
    """Replay of one rank. `run` is called by all ranks of its scope."""

    def __init__(
        self,
        model: Model,
        links: Links,
        window: Conversion,
        borders: Borders | None,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """Prepare.

        Args:
            window: its first snapshot is in place.
            borders: what answers for the other stages; None if all of them replay.
            gather: exchanges values with the ranks of the stage.
        """
        self._model, self._links, self._window = model, links, window
        self._borders, self._gather = borders, gather

    def run(self, note: Callable[[int], None], meet_before: Callable[[int], None]) -> None:
        """Run the iterations again, with what only their records know.

        Args:
            note: called with the iteration before each optimizer step.
            meet_before: called with each iteration before it is run again.
        """
        model, window, borders = self._model, self._window, self._borders
        self._links.player = None if borders is None else borders.player
        for position in range(window.num_replays):
            before, after = window.records[position], window.records[position + 1]
            put_draws(model, before)
            meet_before(before.iteration)
            self._run_again(before, after, window.frozen_units(position), note)
            window.load(position + 1)
        last: Counted = window.records[-1]
        put_draws(model, window.records[-1])
        for after in () if borders is None else borders.tail:
            meet_before(last.iteration)
            if self._run_again(last, after, (), note):
                window.step_scheduler(SAMPLES_PER_ITERATION)
            last = after
        model.consumed = last.consumed_train_samples
        self._links.player = None

    def _run_again(
        self,
        before: Counted,
        after: Counted,
        frozen: Collection[UnitId],
        note: Callable[[int], None],
    ) -> bool:
        """Run one iteration; return False if its step was skipped."""
        model, player = self._model, self._links.player
        model.consumed = before.consumed_train_samples
        if player is not None:
            player.begin(before.iteration)
        self._links.run(model)
        if player is not None:
            player.end()
        signal = model.reduce(self._gather(model.share()))
        note(before.iteration)
        if after.grad_norm is None:
            return False
        model.step(signal, float(after.grad_norm), frozen)
        model.refresh()
        model.sync()
        return True


def put_draws(model: Model, record: IterationRecord) -> None:
    """Restore the random numbers of a rank."""
    content: torch.Tensor = from_json(record.rng["torch"])
    model.draws = int.from_bytes(content.numpy().tobytes(), "little")
