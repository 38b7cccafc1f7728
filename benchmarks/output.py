"""Printing what a benchmark found, and keeping it where the user asked for that."""

from collections.abc import Sequence
from pathlib import Path


def show(parts: Sequence[str], output: Path | None) -> None:
    """Print paragraphs and tables; write them to a file too, if one is named."""
    text = "\n\n".join(parts) + "\n"
    print(text)
    if output:
        output.write_text(text)
