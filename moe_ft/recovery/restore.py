"""Seventh phase of a start: the agreed state becomes live, and the strategy learns what that lost.

A window's snapshots are put back one after another, with one replayed iteration between two of them; whoever
owns the training loop runs that iteration, after the start. A window of W snapshots takes W-1 replays, a
single snapshot none. Source: MoEvement, section 3.3 (sparse-to-dense), which replays one iteration more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from msgspec.msgpack import Decoder

from moe_ft.engine import exchange
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.format.records import IterationRecord
from moe_ft.planning.lost_tokens import Loss, UnitVersion
from moe_ft.planning.recovery import Plan
from moe_ft.planning.tiers import MEMORY, STORAGE
from moe_ft.recovery.agree import Agreed
from moe_ft.recovery.fetch import versions_in
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.left import version_of
from moe_ft.recovery.meet import LiveState, Met
from moe_ft.recovery.put_back import exchange_state, put_back, refresh_weights, sync_weights
from moe_ft.recovery.readers import Readers, StateReader
from moe_ft.state import offloaded
from moe_ft.state import record as records
from moe_ft.state.slices import follows_masters
from moe_ft.state.tensors import inner_optimizers
from moe_ft.strategies.interface import JobLoss, Resumed
from moe_ft.units import Level, UnitId

_LOSS = Decoder(Loss | None)
_POOLED = Decoder(dict[str, UnitVersion | None])
_VERSIONS = Decoder(dict[str, UnitVersion])


class Conversion:
    """One recovery's window on one rank, of which nothing is put back at first.

    Owned by the training thread; `load` is called by all ranks.

    Attributes:
        records: ``[snapshot]``.
    """

    def __init__(self, agreed: Agreed, live: LiveState) -> None:
        assert agreed.fetched.index is not None
        self._agreed = agreed
        self._live = live
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
        for inner in inner_optimizers(optimizer):
            offloaded.bring_back(inner)
        full, compute = self._agreed.fetched.snapshot(position)
        full_slices, compute_slices = self._agreed.slices[position]
        put_back(full, live.catalog, record.iteration, live.phase_hook)
        # FP8 parameters are cast from masters, in units that are not FULL yet from rounded ones, and with
        # delayed scaling by scales of the record.
        put_back(compute, live.catalog, record.iteration, None, follows_masters)
        records.apply_extra_state(record, model)
        exchange_state(live.parameters, full_slices, Level.FULL, live.groups)
        refresh_weights(optimizer)
        # Other weights come after the masters, which mean nothing in units that are not FULL yet.
        put_back(
            compute, live.catalog, record.iteration, None, lambda each: not follows_masters(each)
        )
        exchange_state(live.parameters, compute_slices, Level.COMPUTE, live.groups)
        sync_weights(model, optimizer)
        records.apply(record, model, optimizer, scheduler, live.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """State that is live again on this rank; a replay may still be due.

    Attributes:
        conversion: the window; its first snapshot was put back.
        persisted_index: path of this rank's index in the newest checkpoint on storage; empty without one,
            None if storage could not be read.
        loss: cost of the recovery for the job; None where every snapshot holds every unit.
        kept: state that must stay in memory until a new window is complete, see `plan_to_keep`.
        pooled: versions of rotating units that this rank's pool keeps, by unit name; None if it is to hold
            those that were put back.
    """

    plan: Plan
    fetched: Fetched
    conversion: Conversion
    persisted_index: str | None
    loss: JobLoss | None = None
    kept: Plan | None
    pooled: Mapping[str, UnitEntry] | None = None

    @property
    def record(self) -> IterationRecord:
        """Record of the state that training continues from."""
        return self.conversion.records[-1]


def restore(plan: Plan, agreed: Agreed, met: Met, readers: Readers, kept: Plan | None) -> Restored:
    """Put the first snapshot of a window back. Called by all ranks; `plan_to_keep` says what is kept."""
    conversion = Conversion(agreed, met.live)
    conversion.load(0)
    restored = Restored(
        plan=plan, fetched=agreed.fetched, conversion=conversion, kept=kept, persisted_index=""
    )
    if met.strategy.rotation.is_empty:
        met.strategy.resume(_resumed(plan, agreed))
        return restored
    return _restore_rotation(restored, agreed, met, readers)


Pooled = Mapping[str, UnitEntry] | None
InMemory = Mapping[str, UnitVersion] | None


def _find_pooled(
    fetched: Fetched, kept: Plan | None, met: Met, readers: Readers
) -> tuple[Pooled, InMemory]:
    """Return the versions of rotating units that the pools keep: of this rank, and of the whole stage.

    What a breakpoint holds of these units is not copied to the pool: it would take the place of versions that
    the next recovery needs if a node is lost before a new snapshot is complete. None where no rank of the
    stage has read any from a breakpoint.
    """
    own = {str(unit): fetched.units.get(str(unit)) for unit in met.strategy.rotation.units}
    from_breakpoint = {
        name for name, each in own.items() if each and each.source.version.is_breakpoint
    }
    have_any = met.ranks.stage.gather(bool(from_breakpoint), exchange.BOOL)
    if not any(have_any):
        return None, None
    pooled = {
        name: entry
        for reader in _own_regions(kept, met, readers)
        for name, entry in reader.index.units.items()
        if name in from_breakpoint and reader.stays(entry)
    }
    found = {
        name: pooled.get(name) if name in from_breakpoint else each.entry if each else None
        for name, each in own.items()
    }
    versions = {name: None if each is None else version_of(each) for name, each in found.items()}
    everyone = met.ranks.stage.gather(versions, _POOLED)
    in_memory: dict[str, UnitVersion] = {}
    for name in {name for each in everyone for name in each}:
        # Ranks that save parts of a unit may differ: the strategy then takes it for unsaved.
        of_ranks = [each[name] for each in everyone if name in each]
        if of_ranks[0] is not None and of_ranks.count(of_ranks[0]) == len(of_ranks):
            in_memory[name] = of_ranks[0]
    return pooled, in_memory


def _own_regions(kept: Plan | None, met: Met, readers: Readers) -> Iterator[StateReader]:
    """Yield the reader of this rank's region with the state that is kept, if there is one."""
    own = own_directory(met.site.node_dir, met.site.rank).name
    for source in () if kept is None else kept.sources_of(met.site.rank):
        is_own = PurePosixPath(source.version.path).parent.name == own
        is_region = source.tier == MEMORY and not source.version.is_breakpoint
        reader = readers.open(source) if is_own and is_region else None
        if reader is not None:
            yield reader


def find_persisted(plan: Plan, met: Met, readers: Readers) -> tuple[str | None, Index | None]:
    """Return the path and the index of this rank in the newest checkpoint that the run still has.

    A checkpoint of another layout is nothing that those of this one can build on: the path is then None, so
    that everything is written again. The start after a change of layout may have written none.
    """
    if plan.is_other_layout:
        return None, None
    stored = [
        source
        for source in plan.elsewhere.get(met.site.rank, ())
        if source.tier == STORAGE and source.version.iteration <= plan.iteration
    ]
    for source in sorted(stored, key=lambda each: -each.version.iteration):
        if (reader := readers.open(source)) is not None:
            return source.version.path, reader.index
    return None if met.config.recovery.layout == "any" else "", None


def _restore_rotation(restored: Restored, agreed: Agreed, met: Met, readers: Readers) -> Restored:
    """Find what pools and storage have of rotating units, and tell the strategy. Called by all ranks."""
    plan, ranks, strategy = restored.plan, met.ranks, met.strategy
    path, persisted = find_persisted(plan, met, readers)
    pooled, in_memory = None, None
    if not plan.is_other_layout:  # else all versions are new to this rank's pool
        pooled, in_memory = _find_pooled(agreed.fetched, restored.kept, met, readers)
    on_storage: dict[str, UnitVersion] = {}
    units = sorted(strategy.rotation.units)
    for found in ranks.stage.gather(versions_in(persisted, units), _VERSIONS):
        on_storage.update(found)
    resumed = _resumed(plan, agreed)
    loss = strategy.resume(replace(resumed, in_memory=in_memory, persisted=on_storage))
    cost = strategy.settle_losses(ranks.everyone.gather(loss, _LOSS))
    return replace(restored, persisted_index=path, loss=cost, pooled=pooled)


def _resumed(plan: Plan, agreed: Agreed) -> Resumed:
    assert agreed.fetched.index is not None
    return Resumed(
        iteration=plan.iteration,
        window=agreed.window,
        progress=agreed.fetched.index.progress,
        restored=agreed.fetched.rotation.versions,
        gaps_before=agreed.fetched.rotation.gaps,
    )
