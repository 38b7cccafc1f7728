"""Identity of a start after its recovery, and what its strategy is told of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.format.files import Identity, Start
from moe_ft.planning.branches import continue_history, names_to_supersede, number_of_next
from moe_ft.recovery.job import JobFacts
from moe_ft.recovery.preflight import Site
from moe_ft.recovery.recover import Recovered
from moe_ft.recovery.rotating import versions_in
from moe_ft.strategies.interface import JobLoss, Resumed, Strategy
from moe_ft.strategies.registry import chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class StartNames:
    """Random names of a start, the same on all ranks; the second is that of the run if it begins one."""

    name: str
    lineage: str


def make_identity(
    site: Site,
    facts: JobFacts,
    recovered: Recovered,
    names: StartNames,
    fingerprint: Mapping[str, Any],
) -> Identity:
    """Return who this start is in all that it writes.

    Args:
        site: this rank's place.
        facts: of the job.
        recovered: what the start continues, and what it has found.
        names: of the start.
        fingerprint: the settings that state depends on, by flag.
    """
    config, plan = site.config, recovered.plan
    start = Start(
        number=number_of_next(recovered.starts),
        resumed_at=facts.iteration if plan is None else plan.iteration,
        name=names.name,
        is_chosen=recovered.is_chosen,
    )
    history = continue_history(() if plan is None else plan.history, start)
    kind = chosen(config)
    return Identity(
        job_id=site.job_id,
        lineage=names.lineage if plan is None else plan.lineage,
        history=history,
        fingerprint=dict(fingerprint),
        world_size=facts.world_size,
        strategy=config.strategy.strategy,
        division=kind.division(config),
        replay_settings=facts.replay_settings if kind.replays else {},
        superseded=names_to_supersede(recovered.names, history),
        began_with=facts.began_with if plan is None else plan.began_with,
    )


def resume_strategy(
    strategy: Strategy, recovered: Recovered, stage: StageSum, agreement: Agreement
) -> JobLoss | None:
    """Tell a strategy what was recovered; return what that cost the job, None if nothing.

    Called by all ranks.

    Args:
        strategy: of this start.
        recovered: on this rank.
        stage: the ranks of this one's stage.
        agreement: all ranks.
    """
    index = recovered.fetched.index
    assert index is not None and recovered.plan is not None
    persisted = {}
    if not strategy.saves_all:
        units = sorted(strategy.rotating)
        for found in stage.gather(versions_in(recovered.previous[1], units)):
            persisted.update(found)
    loss = strategy.resume(
        Resumed(
            iteration=recovered.plan.iteration,
            window=index.window,
            progress=index.progress,
            restored=recovered.rotating.versions,
            persisted=persisted,
            gaps_before=recovered.rotating.gaps,
        )
    )
    return strategy.settle_losses(agreement.gather(loss))
