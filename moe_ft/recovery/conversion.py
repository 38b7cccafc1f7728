"""Sparse-to-dense conversion: a window that was read becomes the state at its last iteration.

A window's snapshots are put back one after the other, with one replayed iteration between two of them;
running those is the business of whoever owns the training loop. A window of W snapshots takes W-1 replays, of
one snapshot none. Source: MoEvement, section 3.3, which replays one iteration more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ft.engine.background import PhaseHook
from moe_ft.format.records import IterationRecord
from moe_ft.recovery.gather import RestoredSlices, exchange_state, refresh_weights, sync_weights
from moe_ft.recovery.restore import FetchedState, put_back
from moe_ft.state import record as records
from moe_ft.state.catalog import UnitCatalog
from moe_ft.units import Level, UnitId


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a conversion puts state back into.

    Attributes:
        catalog: of this rank.
        built: model chunks, Megatron's outermost optimizer and its scheduler.
        groups: Megatron's ProcessGroupCollection.
        phase_hook: called in the middle of putting back a snapshot.
    """

    catalog: UnitCatalog
    built: tuple[Any, Any, Any]
    groups: Any
    phase_hook: PhaseHook


class Conversion:
    """One recovery's window on one rank. Owned by the training thread; `load` is called by all ranks.

    Attributes:
        records: ``[snapshot]``.
    """

    def __init__(
        self,
        fetched: FetchedState,
        restored: Sequence[tuple[RestoredSlices, RestoredSlices]],
        positions: Mapping[UnitId, int],
        target: Target,
    ) -> None:
        """Prepare a conversion.

        Args:
            fetched: what this rank has read.
            restored: ``[snapshot]`` the slices that the ranks have read of what several of them hold
                alike, at FULL and at COMPUTE.
            positions: of all units of the stage, which snapshot has them at FULL.
            target: where it goes.
        """
        assert fetched.index is not None
        self._fetched, self._restored, self._target = fetched, restored, target
        self._positions = positions
        self.records: tuple[IterationRecord, ...] = fetched.index.records[-len(restored) :]

    @property
    def num_replays(self) -> int:
        """Iterations that must be run again."""
        return len(self._restored) - 1

    def frozen_units(self, position: int) -> frozenset[UnitId]:
        """Return the units that only a later snapshot has at FULL."""
        return frozenset(unit for unit, own in self._positions.items() if own > position)

    def load(self, position: int) -> None:
        """Put back a snapshot, and the record of its iteration but for the random numbers.

        After the first one: when the iteration before has been run again.
        """
        target, iteration = self._target, self.records[position].iteration
        model, optimizer, scheduler = target.built
        parameters = target.catalog.parameters
        full, compute = self._fetched.snapshot(position)
        full_slices, compute_slices = self._restored[position]
        put_back(full, target.catalog, iteration, target.phase_hook)
        exchange_state(parameters, full_slices, Level.FULL, target.groups)
        refresh_weights(optimizer)
        # Behind it: the masters of units that are not FULL yet mean nothing.
        put_back(compute, target.catalog, iteration, None)
        exchange_state(parameters, compute_slices, Level.COMPUTE, target.groups)
        sync_weights(model)
        records.apply(self.records[position], model, optimizer, scheduler, parameters)
