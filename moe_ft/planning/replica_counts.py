"""Replicas of the experts of a layer, from the tokens that go to each. Their ranks: slot_tables.py."""

from collections.abc import Sequence

from moe_ft.errors import PlanError


def possible_minimum(num_experts: int, num_slots: int, minimum: int) -> int:
    """Return the replicas that every expert can have, at most `minimum`.

    Raises:
        PlanError: if there are fewer slots than experts, or the minimum is less than 1.
    """
    if minimum < 1:
        raise PlanError(f"every expert needs a replica, but the minimum is {minimum}")
    if not 0 < num_experts <= num_slots:
        raise PlanError(f"{num_experts} experts need as many slots, there are {num_slots}")
    return min(minimum, num_slots // num_experts)


def allocate(load: Sequence[int], num_slots: int, minimum: int) -> tuple[int, ...]:
    """Return the replicas of each expert, in proportion to its load.

    Experts get slots in order of their load, the least loaded first: the share of their load in what is left,
    rounded down, and no less than the minimum. The last one gets the rest. If the slots do not suffice for
    the minimum, it is the largest for which they do (section 6.2 of the paper).

    Args:
        load: ``[expert]`` tokens; equal ones are in order of the experts.
        num_slots: of all ranks of the layer.
        minimum: replicas that every expert should have, at least 1.

    Returns:
        ``[expert]`` replicas; their sum is `num_slots`.

    Raises:
        PlanError: as `possible_minimum` does.

    Source: Lazarus, equation 1, in integers.
    """
    least = possible_minimum(len(load), num_slots, minimum)
    counts = [0] * len(load)
    slots, tokens = num_slots, sum(load)
    ascending = sorted(range(len(load)), key=lambda expert: (load[expert], expert))
    for done, expert in enumerate(ascending):
        share = load[expert] * slots // tokens if tokens else slots // (len(load) - done)
        counts[expert] = max(share, least)
        slots -= counts[expert]
        tokens -= load[expert]
    assert slots == 0  # a share of the least loaded leaves the minimum for all others
    return tuple(counts)


def popular(load: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """Return the replicas of each expert, next to its share of the load of the last iteration.

    Args:
        load: ``[expert]`` tokens.
        num_slots: of all ranks of the layer.

    Returns:
        ``[expert]`` replicas, at least 1; their sum is `num_slots`.

    Raises:
        PlanError: as `possible_minimum` does.

    Source: SYMI, the placement of an iteration by the popularity of the one before.
    """
    possible_minimum(len(load), num_slots, 1)
    goals = [tokens * num_slots for tokens in load] if any(load) else [num_slots] * len(load)
    total = sum(load) or len(load)
    counts = [max(goal // total, 1) for goal in goals]

    def excess(expert: int) -> int:
        return counts[expert] * total - goals[expert]

    while sum(counts) > num_slots:
        counts[max((each for each in range(len(load)) if counts[each] > 1), key=excess)] -= 1
    while sum(counts) < num_slots:
        counts[min(range(len(load)), key=excess)] += 1
    return tuple(counts)
