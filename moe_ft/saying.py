"""Lines for the people who watch a job."""

import sys
from contextlib import suppress


def say(line: str) -> None:
    """Print a line, on stderr and at once. A stderr that takes nothing more ends no run."""
    with suppress(OSError, ValueError):
        # One write: print() makes two with `python -u`, and lines of several ranks would mix.
        sys.stderr.write(f"moe_ft: {line}\n")
        sys.stderr.flush()
