"""Lines for the people who watch a job."""

import sys


def say(line: str) -> None:
    """Print a line, on stderr and at once."""
    print(f"moe_ft: {line}", file=sys.stderr, flush=True)
