"""Targets that a local recovery can reach with what is left, found by trying everything.

It knows the rules of docs/local_recovery.md and shares no code with the planning of the product.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from moe_ft.format.boundary import BoundaryIndex, Direction
from moe_ft.format.identity import History
from moe_ft.format.index import Index
from tests.simulation.shape import Shape

Wire = tuple[int, int, Direction, int]  # sender, receiver, direction, iteration
State = tuple[
    int, int
]  # the iteration that is put back first, and the iteration of the whole state


def best_local(
    shape: Shape, indexes: Sequence[Index], logs: Iterable[tuple[BoundaryIndex, int]]
) -> tuple[int, int] | None:
    """Return the newest target and the fewest iterations that all stages together run again for it.

    Args:
        indexes: of the intact states of all ranks.
        logs: indexes of boundary logs, each with a receiver that can read all that it was sent.

    Returns:
        None if there is none. A target does not count if the cheapest way runs the same ones on all stages.
    """
    if not indexes:
        return None
    run = max((each.identity.history for each in indexes), key=lambda each: each[-1].number)
    alive = [each for each in indexes if is_alive(each.iteration, each.identity.history, run)]
    states = [_states_of(alive, shape.ranks_of(stage)) for stage in range(shape.stages)]
    known = {each.iteration - age for each in alive for age in range(each.window)}
    wires: set[Wire] = set()
    for log, receiver in logs:
        if is_alive(log.iteration + 1, log.identity.history, run):
            directions = {each.direction for each in log.sent if each.neighbour == receiver}
            wires |= {(log.rank, receiver, each, log.iteration) for each in directions}
        if log.numbers and is_alive(log.iteration, log.identity.history, run):
            known.add(log.numbers.iteration)
    for target in sorted({end for own in states for _, end in own}, reverse=True):
        possible = [
            [
                state
                for state in own
                if state[1] <= target and known >= {*range(state[1] + 1, target + 1)}
            ]
            for own in states
        ]
        costs = {
            begins: sum(target - begin for begin in begins)
            for begins in product(*({begin for begin, _ in own} for own in possible))
            if wires >= {*_needed(begins, target, shape)}
        }
        cheapest = min(costs, key=lambda each: costs[each], default=())
        # If all stages run the same ones again, that is a global recovery.
        if cheapest and (len({*cheapest}) > 1 or cheapest[0] == target):
            return target, costs[cheapest]
    return None


def is_alive(iteration: int, history: History, run: History) -> bool:
    """Return whether no later start of the run has gone back before an iteration."""
    names = [each.name for each in run]
    writer = history[-1].name
    if writer not in names:
        return False
    return all(each.resumed_at >= iteration for each in run[names.index(writer) + 1 :])


def _states_of(alive: Iterable[Index], ranks: Sequence[int]) -> set[State]:
    holders: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    for each in alive:
        # Only whole states of several starts fit together.
        start = each.identity.start.name if each.window > 1 else ""
        holders[each.iteration, each.window, start].add(each.rank)
    return {
        (iteration - window + 1, iteration)
        for (iteration, window, _), found in holders.items()
        if found >= {*ranks}
    }


def _needed(begins: Sequence[int], target: int, shape: Shape) -> Iterator[Wire]:
    """Yield what stages receive that run an iteration again, from others that do not."""
    for stage, begin in enumerate(begins):
        for other, direction in ((stage - 1, Direction.FORWARD), (stage + 1, Direction.BACKWARD)):
            if 0 <= other < shape.stages:
                for iteration in range(begin, min(target, begins[other])):
                    for receiver in shape.ranks_of(stage):
                        sender = receiver + (other - stage) * shape.width
                        yield sender, receiver, direction, iteration
