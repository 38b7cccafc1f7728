"""Tables as plain text, in the one form that all commands print.

A header above a rule, two spaces between columns, numbers to the right; no colours, and nothing cut off. Only
where a width is given are long cells wrapped, between words.
"""

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from io import StringIO

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_ft.saying import escape

_RULE_BELOW_HEADER = Box("\n".join(["    ", "    ", "----", *["    "] * 5]) + "\n", ascii=True)
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?%)?|-|")
_LONGEST_WORD = 40  # that is never broken
_WIDEST = 100_000


def terminal_width() -> int | None:
    """Return the width of the terminal that standard output is, None if it is something else."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    rows: Iterable[Sequence[object]], headers: Sequence[str] = (), *, width: int | None = None
) -> str:
    """Return a table without a line end.

    Args:
        rows: cells of each row; None is an empty cell.
        headers: names of the columns; without any there is no rule either.
        width: most letters of a line, None for no limit.
    """
    # Escaped here: rich would leave out what a terminal acts on.
    cells = [["" if cell is None else escape(str(cell)) for cell in row] for row in rows]
    columns = [*zip(*cells, strict=True)] or [()] * len(headers)
    grid = Table(
        box=_RULE_BELOW_HEADER,
        show_edge=False,
        show_header=bool(headers),
        padding=(0, 1, 0, 0),
    )
    for number, column in enumerate(columns):
        name = headers[number] if headers else ""
        longest = max((len(word) for cell in (name, *column) for word in cell.split()), default=0)
        grid.add_column(
            Text(name),
            justify="right" if headers and all(map(_NUMBER.fullmatch, column)) else "left",
            min_width=min(longest, _LONGEST_WORD),
            overflow="fold",
        )
    for row in cells:
        grid.add_row(*map(Text, row))
    # One more, for the space behind the last column: pad_edge=False would cut letters off.
    wide = _WIDEST if width is None else width + 1
    console = Console(file=StringIO(), width=wide, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(grid)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    if headers:
        lines[1] = lines[1][:-1]
    return "\n".join(lines)
