"""Lines for people. What stands in them may be of anybody's files, and does nothing to a terminal."""

import re
import sys
from contextlib import suppress
from typing import Any

# Control characters but the ends of lines and tabs, and what changes the direction of writing.
_ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape(text: str) -> str:
    """Return a text with escapes for what a terminal acts on."""
    return _ACTING.sub(lambda found: ascii(found[0])[1:-1], text)


class Escaping:
    """Stream that escapes what is written to another one, `raw`."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def write(self, text: str) -> Any:
        """Write a text."""
        return self.raw.write(escape(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def say(line: str) -> None:
    """Print a line, on stderr and at once. A stderr that takes nothing more ends no run."""
    with suppress(OSError, ValueError):
        # One write: print() makes two with `python -u`, and lines of several ranks would mix.
        sys.stderr.write(f"moe_ft: {escape(line)}\n")
        sys.stderr.flush()
