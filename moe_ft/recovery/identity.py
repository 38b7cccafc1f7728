"""Identity of a start in everything that it writes."""

from msgspec import UNSET

from moe_ft.format.identity import Identity, Start
from moe_ft.planning.branches import continue_history, names_to_supersede, number_of_next
from moe_ft.planning.recovery import Plan
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.meet import Met
from moe_ft.strategies.registry import chosen


def make_identity(
    met: Met, inventory: Inventory, plan: Plan | None, *, is_chosen: bool
) -> Identity:
    """Return the identity of a start.

    Args:
        met: this rank and its job.
        inventory: everything that the start has found.
        plan: the state that it continues; None if it begins a run.
        is_chosen: whether the user has named where this start begins.
    """
    config, facts, kind = met.config, met.facts, chosen(met.config)
    start = Start(
        number=number_of_next(inventory.starts),
        resumed_at=facts.iteration if plan is None else plan.iteration,
        name=met.names.name,
        is_chosen=is_chosen,
    )
    history = continue_history(() if plan is None else plan.history, start)
    return Identity(
        job_id=met.site.job_id,
        lineage=met.names.lineage if plan is None else plan.lineage,
        history=history,
        fingerprint=dict(met.fingerprint),
        world_size=facts.world_size,
        strategy=config.strategy.strategy,
        division=kind.division(config),
        replay_settings=facts.replay_settings,
        script_settings=facts.script_settings or UNSET,
        superseded=names_to_supersede(inventory.names, history),
        began_with=facts.began_with if plan is None else plan.began_with,
    )
