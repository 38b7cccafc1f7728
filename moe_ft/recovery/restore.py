"""Seventh phase of a start: the agreed state becomes live, and the strategy learns what that lost."""

from dataclasses import dataclass

from moe_ft.format.index import Index
from moe_ft.format.records import IterationRecord
from moe_ft.planning.recovery import Plan, Tier
from moe_ft.planning.token_ledger import UnitVersion
from moe_ft.recovery.agree import Agreed
from moe_ft.recovery.fetch import Fetched
from moe_ft.recovery.meet import Met
from moe_ft.recovery.readers import Readers
from moe_ft.recovery.replay import Conversion
from moe_ft.recovery.rotating import versions_in
from moe_ft.strategies.interface import JobLoss, Resumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """State that is live again on this rank; a replay may still be due.

    Attributes:
        plan: where the state came from.
        fetched: units that were put back.
        conversion: the window; its first snapshot was put back.
        persisted_index: path of this rank's index in the newest checkpoint on storage; empty without one.
        loss: cost of the recovery for the job; None where every snapshot holds every unit.
    """

    plan: Plan
    fetched: Fetched
    conversion: Conversion
    persisted_index: str
    loss: JobLoss | None

    @property
    def record(self) -> IterationRecord:
        """Record of the state that training continues from."""
        return self.conversion.records[-1]


def restore(plan: Plan, agreed: Agreed, met: Met, readers: Readers) -> Restored:
    """Put the first snapshot of a window back. Called by all ranks."""
    conversion = Conversion(agreed, met.live)
    conversion.load(0)
    path, index = ("", None) if met.strategy.saves_all else _find_persisted(plan, met, readers)
    return Restored(
        plan=plan,
        fetched=agreed.fetched,
        conversion=conversion,
        persisted_index=path,
        loss=_resume_strategy(plan, agreed.fetched, index, met),
    )


def _find_persisted(plan: Plan, met: Met, readers: Readers) -> tuple[str, Index | None]:
    """Return the path and the index of this rank in the newest checkpoint that the run still has."""
    stored = [
        source
        for source in plan.elsewhere.get(met.site.rank, ())
        if source.tier is Tier.STORAGE and source.version.iteration <= plan.iteration
    ]
    for source in sorted(stored, key=lambda each: -each.version.iteration):
        if (reader := readers.open(source)) is not None:
            return source.version.path, reader.index
    return "", None


def _resume_strategy(
    plan: Plan, fetched: Fetched, persisted: Index | None, met: Met
) -> JobLoss | None:
    """Tell the strategy what was recovered; return the loss of the whole job. Called by all ranks."""
    index, strategy, ranks = fetched.index, met.strategy, met.ranks
    assert index is not None
    on_storage: dict[str, UnitVersion] = {}
    if not strategy.saves_all:
        units = sorted(strategy.rotating)
        for found in ranks.stage.gather(versions_in(persisted, units)):
            on_storage.update(found)
    loss = strategy.resume(
        Resumed(
            iteration=plan.iteration,
            window=index.window,
            progress=index.progress,
            restored=fetched.rotation.versions,
            persisted=on_storage,
            gaps_before=fetched.rotation.gaps,
        )
    )
    return strategy.settle_losses(ranks.everyone.gather(loss))
