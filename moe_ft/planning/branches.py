"""The branches of a run: which of several states belongs to it, and which of several starts is the later.

A start names itself in the history of all that it writes. Two starts may continue the same state without
knowing of each other: a node is cut off with what the first has left, and comes back after the second. Clocks
do not order them. What does is what a start has found when it began: it comes after every start that it has
found something of. Of starts that did not know of each other, the one whose work got further comes first.

Pure. What is recovered from is planning/recovery.py; what storage keeps is engine/retention.py.
"""

from collections.abc import Iterable, Mapping, Sequence

from moe_ft.format.identity import History, Identity, Start

MOST_STARTS = 256  # in a history, and in the names that a start remembers


def is_alive(iteration: int, history: History, run: History) -> bool:
    """Return whether a state belongs to a run as that was continued.

    Args:
        iteration: of the state.
        history: of the state, up to the start that wrote it.
        run: history of the run.

    Returns:
        False for what another branch wrote, and for what lies after the point from which a later start of the
        run continued.
    """
    if history[-1] not in run:
        return False
    later = run[run.index(history[-1]) + 1 :]
    return all(iteration <= start.resumed_at for start in later)


def continue_history(history: History, start: Start) -> History:
    """Return the history of a start that continues a run.

    Earlier starts of which nothing is alive any more are left out, and of very many starts the oldest: what
    those wrote then counts as another branch, which comes after this one. Starts that a user has chosen stay,
    since restarts follow them.
    """
    alive = tuple(each for each in history if each.resumed_at <= start.resumed_at)
    chosen = tuple(each for each in alive[: -MOST_STARTS + 1] if each.is_chosen)
    return (*chosen, *alive[-MOST_STARTS + 1 :], start)


def number_of_next(starts: Iterable[Start]) -> int:
    """Return a number that is greater than those of all starts that were found."""
    return 1 + max((start.number for start in starts), default=-1)


def names_to_supersede(found: Iterable[str], history: History) -> tuple[str, ...]:
    """Return the names that a start remembers of what it has found and does not continue.

    Args:
        found: names of starts in the order of their numbers, also those that these remember.
        history: of the new start.
    """
    own = {start.name for start in history}
    return tuple(name for name in found if name and name not in own)[-MOST_STARTS:]


def known_names(history: History, superseded: Sequence[str]) -> frozenset[str]:
    """Return the names of the starts that come before the last one of a history."""
    return frozenset(superseded).union(start.name for start in history[:-1]) - {""}


def has_superseded(later: Identity, earlier: Identity) -> bool:
    """Return whether the start that wrote one thing knew of the start that wrote another."""
    return earlier.start.name in known_names(later.history, later.superseded)


def order_starts(
    progress: Mapping[Start, int], known: Mapping[Start, frozenset[str]]
) -> list[Start]:
    """Order starts by the worth of their work, best first.

    Args:
        progress: by start, the newest iteration of its own that is usable.
        known: by start, the names of those that it comes after.
    """
    rest, ordered = set(progress), []
    while rest:
        names = frozenset[str]().union(*(known[start] for start in rest))
        latest = [start for start in rest if start.name not in names]
        best = max(latest or rest, key=lambda start: (progress[start], start.number, start.name))
        ordered.append(best)
        rest.remove(best)
    return ordered
