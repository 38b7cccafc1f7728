"""Outcome of a start: what was recovered, from where, and what it cost. For the loop and the event log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_ft.format.identity import Identity
from moe_ft.format.records import IterationRecord
from moe_ft.planning.local_recovery import LocalPlan
from moe_ft.planning.recovery import Plan, Tier
from moe_ft.recovery.meet import Met
from moe_ft.recovery.restore import Restored
from moe_ft.strategies.interface import JobLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Report of a start about its recovery, on one rank.

    Attributes:
        iteration: where training continues.
        record: record of that state; None if nothing was recovered.
        start: number of this start.
        writer: number of the start that wrote the recovered state.
        sources: number of units by tier.
        phases_s: seconds by phase.
        problems: state that was looked at and rejected, with the reasons.
        hindrance: reason why no newer state was reached, or no stage recovers alone; empty if neither is so.
        is_deterministic: whether a replay computes the same bits.
        loss: cost of the recovery; None where every snapshot holds every unit.
        stages: pipeline stages that run iterations again alone; none in a global recovery.
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
    hindrance: str = ""


def _stages_of(plan: Plan) -> tuple[int, ...]:
    scopes = plan.scope.scopes if isinstance(plan, LocalPlan) else ()
    return tuple(sorted(stage for each in scopes for stage in each.stages))


def make_outcome(
    met: Met,
    restored: Restored | None,
    identity: Identity,
    phases_s: Mapping[str, float],
    problems: Sequence[str],
    hindrance: str = "",
) -> Outcome:
    """Return the outcome of a start.

    Args:
        met: this rank and its job.
        restored: state that was recovered; None if nothing was.
        identity: identity of the start.
        phases_s: seconds by phase so far.
        problems: state that was looked at and rejected, with the reasons.
        hindrance: see `Outcome`.
    """
    return Outcome(
        iteration=met.facts.iteration if restored is None else restored.plan.iteration,
        start=identity.start.number,
        is_deterministic=met.facts.is_deterministic,
        phases_s=phases_s,
        problems=problems,
        record=None if restored is None else restored.record,
        writer=0 if restored is None else restored.plan.start.number,
        sources={} if restored is None else dict(restored.fetched.sources),
        loss=None if restored is None else restored.loss,
        stages=() if restored is None else _stages_of(restored.plan),
        lossy={} if restored is None else restored.fetched.lossy,
        hindrance=hindrance,
    )
