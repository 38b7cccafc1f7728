"""Progress bars on standard error, in the one form that all commands show.

Nothing is shown where that is no terminal, and nothing stays when the work is done.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Bar:
    """Bar that is shown. Any thread may call it."""

    def __init__(self, progress: Progress, what: str, total: float) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=total, note="")

    def advance(self, by: float, note: str = "") -> None:
        """Add some progress, and say something behind the bar."""
        self._progress.update(self._task, advance=by, note=note)

    def reach(self, completed: float) -> None:
        """Show how much of the total is done."""
        self._progress.update(self._task, completed=completed)


@contextmanager
def progress_bar(what: str, total: float, *, in_bytes: bool = False) -> Iterator[Bar]:
    """Show a bar with the time that is left, and remove it at the end."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    console = Console(file=getattr(sys.stderr, "raw", sys.stderr))
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, what, total)
