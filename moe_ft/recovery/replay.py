"""Replay, after a start: a window that was read becomes the state at its last iteration (sparse-to-dense).

A window's snapshots are put back one after another, with one replayed iteration between two of them; whoever
owns the training loop runs that iteration. A window of W snapshots takes W-1 replays, a single snapshot none.
Source: MoEvement, section 3.3, which replays one iteration more.
"""

from moe_ft.format.records import IterationRecord
from moe_ft.recovery.agree import Agreed
from moe_ft.recovery.meet import LiveState
from moe_ft.recovery.put_back import exchange_state, put_back, refresh_weights, sync_weights
from moe_ft.state import record as records
from moe_ft.units import Level, UnitId


class Conversion:
    """One recovery's window on one rank. Owned by the training thread; `load` is called by all ranks.

    Attributes:
        records: ``[snapshot]``.
    """

    def __init__(self, agreed: Agreed, live: LiveState) -> None:
        """Prepare a conversion; nothing is put back yet."""
        assert agreed.fetched.index is not None
        self._agreed, self._live = agreed, live
        self.records: tuple[IterationRecord, ...] = agreed.fetched.index.records[
            -len(agreed.slices) :
        ]

    @property
    def num_replays(self) -> int:
        """Iterations that must be run again."""
        return len(self._agreed.slices) - 1

    def frozen_units(self, position: int) -> frozenset[UnitId]:
        """Return the units that only a later snapshot has at FULL."""
        return frozenset(unit for unit, own in self._agreed.positions.items() if own > position)

    def step_scheduler(self, num_samples: int) -> None:
        """Step learning rate and weight decay, as the training loop does after an iteration."""
        self._live.built[2].step(increment=num_samples)

    def load(self, position: int) -> None:
        """Put back a snapshot, and the record of its iteration except for the random numbers.

        Each snapshot but the first one is put back after the iteration before it has been run again.
        """
        live, record = self._live, self.records[position]
        model, optimizer, scheduler = live.built
        full, compute = self._agreed.fetched.snapshot(position)
        full_slices, compute_slices = self._agreed.slices[position]
        put_back(full, live.catalog, record.iteration, live.phase_hook)
        exchange_state(live.parameters, full_slices, Level.FULL, live.groups)
        refresh_weights(optimizer)
        # After the masters: those of units that are not FULL yet mean nothing.
        put_back(compute, live.catalog, record.iteration, None)
        exchange_state(live.parameters, compute_slices, Level.COMPUTE, live.groups)
        sync_weights(model)
        records.apply(record, model, optimizer, scheduler, live.parameters)
