"""Branches of a run: the states that belong to it, and the order of its starts.

A start names itself in the history of everything that it writes. Two starts may continue the same state
without knowing of each other: a node is cut off with what the first has left, and comes back after the
second. Clocks do not order them. A start comes after every start of which it found something when it began.
Of two starts that did not know of each other, the one whose work got further comes first.

Pure. planning/recovery.py chooses the state to recover, engine/persist/retention.py what storage keeps.
"""

from collections.abc import Iterable, Mapping, Sequence

from moe_ft.format.identity import History, Identity, Start

MOST_STARTS = 256  # in a history, and in the names that a start remembers


def is_alive(iteration: int, history: History, run: History) -> bool:
    """Return whether a state belongs to a run as it was continued.

    Args:
        history: of the state, up to the start that wrote it.

    Returns:
        False for a state of another branch, and for one after the iteration from which a later start of the
        run continued.
    """
    if history[-1] not in run:
        return False
    later = run[run.index(history[-1]) + 1 :]
    return all(iteration <= start.resumed_at for start in later)


def continue_history(history: History, start: Start) -> History:
    """Return the history of a start that continues a run.

    It leaves out earlier starts of which nothing is alive, and the oldest of very many starts: their states
    then count as another branch, which comes after this one. Starts that a user has chosen stay, since
    restarts follow them.
    """
    alive = tuple(each for each in history if each.resumed_at <= start.resumed_at)
    chosen = tuple(each for each in alive[: -MOST_STARTS + 1] if each.is_chosen)
    return (*chosen, *alive[-MOST_STARTS + 1 :], start)


def number_of_next(starts: Iterable[Start]) -> int:
    """Return a number greater than that of any start that was found."""
    return 1 + max((start.number for start in starts), default=-1)


def names_to_supersede(found: Iterable[str], history: History) -> tuple[str, ...]:
    """Return the names of the starts that a start has found and does not continue.

    Args:
        found: names of starts in the order of their numbers, and the names that these remember.
    """
    own = {start.name for start in history}
    return tuple(name for name in found if name and name not in own)[-MOST_STARTS:]


def known_names(history: History, superseded: Sequence[str]) -> frozenset[str]:
    """Return the names of the starts that the last start of a history comes after."""
    return frozenset(superseded).union(start.name for start in history[:-1]) - {""}


def has_superseded(later: Identity, earlier: Identity) -> bool:
    """Return whether the start that wrote one thing knew of the start that wrote another."""
    return earlier.start.name in known_names(later.history, later.superseded)


def order_starts(
    progress: Mapping[Start, int], known: Mapping[Start, frozenset[str]]
) -> list[Start]:
    """Order starts by the worth of their work, best first.

    Args:
        progress: by start, the newest usable iteration that it wrote.
        known: by start, the names of the starts that it comes after.
    """
    rest, ordered = set(progress), []
    while rest:
        names = frozenset[str]().union(*(known[start] for start in rest))
        latest = [start for start in rest if start.name not in names]
        best = max(latest or rest, key=lambda start: (progress[start], start.number, start.name))
        ordered.append(best)
        rest.remove(best)
    return ordered


def order_written(found: Iterable[tuple[int, History, Sequence[str]]]) -> list[History]:
    """Return the histories of the starts that wrote something, complete or not, the latest first.

    Args:
        found: the iteration of each thing, and of its writer the history and the names it has superseded.
    """
    progress: dict[Start, int] = {}
    writers: dict[Start, tuple[History, Sequence[str]]] = {}
    for iteration, history, superseded in found:
        progress[history[-1]] = max(iteration, progress.get(history[-1], 0))
        writers[history[-1]] = history, superseded
    known = {start: known_names(*writer) for start, writer in writers.items()}
    return [writers[start][0] for start in order_starts(progress, known)]
