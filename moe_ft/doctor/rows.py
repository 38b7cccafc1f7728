"""Rows of the doctor's table: their results, their order for people, and the exit code that follows."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import msgspec

from moe_ft.errors import MoeFtError
from moe_ft.files.progress import call_within
from moe_ft.saying import some_of
from moe_ft.tables import table, terminal_width

_MOST_NODES_NAMED = 3
_MOST_ROWS_OF_A_CHECK = 4  # that pass; of more an example is shown
_WIDTH = 118  # where there is no terminal


class Result(StrEnum):
    """Outcome of a check."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


class CheckRow(msgspec.Struct, frozen=True):
    """Outcome of one check at one place, such as a node, a rank or a directory."""

    check: str
    where: str
    result: Result
    found: str
    remedy: str = ""


def passed(check: str, where: str, found: str) -> CheckRow:
    """Return a row of something that is as it should be."""
    return CheckRow(check, where, Result.PASS, found)


def warned(check: str, where: str, found: str, remedy: str) -> CheckRow:
    """Return a row of something that may cost time or safety later."""
    return CheckRow(check, where, Result.WARN, found, remedy)


def failed(check: str, where: str, found: str, remedy: str) -> CheckRow:
    """Return a row of something with which the run would fail or lose state."""
    return CheckRow(check, where, Result.FAIL, found, remedy)


def refused(
    check: str, where: str, error: MoeFtError, result: Result = Result.FAIL, remedy: str = ""
) -> CheckRow:
    """Return a row of what a start would refuse; the last sentences of its message are the remedy."""
    # Without the node, which is in the row: those of several nodes are folded.
    found, _, advice = str(error).replace(f" on node {where}", "").partition(". ")
    return CheckRow(check, where, result, found, remedy or advice)


def guarded(
    check: str, where: str, act: Callable[[], Sequence[CheckRow]], deadline_s: float
) -> list[CheckRow]:
    """Return the rows of a check, or one row that says why it gave none.

    Args:
        act: the check. It runs on a thread of its own, which stays behind if it hangs.
        deadline_s: of the monotonic clock.
    """
    try:
        return list(call_within(act, max(0.1, deadline_s - time.monotonic()), "this check"))
    except Exception as error:  # a check must not keep others from being reported
        found = f"{type(error).__name__}: {error}"
        return [failed(check, where, found, "Look at what the message names.")]


def join_nodes(nodes: Sequence[str]) -> str:
    """Return names for a cell of the table."""
    return some_of(nodes, _MOST_NODES_NAMED)


def fold(rows: Iterable[CheckRow]) -> list[CheckRow]:
    """Return fewer rows: one for all places with the same text, and an example where many pass."""
    places: dict[CheckRow, list[str]] = {}
    for row in rows:
        places.setdefault(msgspec.structs.replace(row, where=""), []).append(row.where)
    folded = [
        msgspec.structs.replace(row, where=join_nodes(list(dict.fromkeys(where))))
        for row, where in places.items()
    ]
    order = {name: number for number, name in enumerate(dict.fromkeys(row.check for row in folded))}
    kept: list[CheckRow] = []
    for name in order:
        own = [row for row in folded if row.check == name]
        good = [row for row in own if row.result is Result.PASS]
        kept += [row for row in own if row.result is not Result.PASS]
        if len(good) > _MOST_ROWS_OF_A_CHECK:
            example = f"for example {good[0].where}: {good[0].found}"
            good = [passed(name, f"{len(good)} places", example)]
        kept += good
    return sorted(kept, key=lambda row: order[row.check])


def render(rows: Sequence[CheckRow]) -> str:
    """Return the table, and the number of each result."""
    cells = [(row.check, row.where, row.result.upper(), row.found, row.remedy) for row in rows]
    headers = ("check", "where", "result", "found", "remedy")
    text = table(cells, headers, width=terminal_width() or _WIDTH)
    counts = ", ".join(f"{sum(row.result is each for row in rows)} {each}" for each in Result)
    return f"{text}\n\n{counts}"


def exit_code(rows: Iterable[CheckRow], *, strict: bool) -> int:
    """Return 1 if something failed or, if strict, something is to be warned of; else 0."""
    bad = {Result.FAIL, Result.WARN} if strict else {Result.FAIL}
    return int(any(row.result in bad for row in rows))


def rate_text(num_bytes: int, seconds: float) -> str:
    """Return a bandwidth for people."""
    rate = num_bytes / seconds if seconds > 0 else math.inf
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
