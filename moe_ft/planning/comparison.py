"""Comparison of a plan with other state that was found: what is passed over, and what may be newer. Pure.

planning/recovery.py makes the plans.
"""

from collections.abc import Sequence

from moe_ft.format.identity import Start
from moe_ft.planning.branches import known_names
from moe_ft.planning.recovery import Plan, Rejection


def passed_over(plan: Plan, plans: Sequence[Plan]) -> list[Rejection]:
    """Return the newest state of each start that could have been used instead of a plan, with the reasons.

    Args:
        plans: all plans, best first.
    """
    version = plan.version
    known = known_names(version.history, version.superseded)
    found: dict[Start, Rejection] = {}
    for each in plans[plans.index(plan) + 1 :]:
        is_older = each.start.name in known and each.iteration <= plan.iteration
        if each.start == plan.start or each.start in found or is_older:
            continue
        reason = (
            f"start {plan.start.number} came after it and left it"
            if each.start.name in known
            else f"start {each.start.number} is of another branch, which got less far"
        )
        found[each.start] = Rejection(
            iteration=each.iteration,
            start=each.start,
            reason=f"iteration {each.iteration}: {reason}",
        )
    return list(found.values())


def newer_than(plan: Plan, others: Sequence[Rejection]) -> list[Rejection]:
    """Return the rejected states that may be newer than a plan.

    They are of a later iteration, or of a start that the writer of the plan's state did not know of.
    """
    version = plan.version
    known = known_names(version.history, version.superseded) | {plan.start.name}
    return [
        each
        for each in others
        if each.iteration > plan.iteration or (each.start.name and each.start.name not in known)
    ]
