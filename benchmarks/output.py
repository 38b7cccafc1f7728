"""Output of benchmarks: paragraphs and tables, printed and written to a file on request."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from tabulate import tabulate


def markdown_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Return a table in GitHub's Markdown, with all cells as they are given."""
    return tabulate(list(rows), headers, "github", disable_numparse=True)


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the median and, in brackets, the range; '-' for nothing."""
    if not values:
        return "-"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def distinct(values: Iterable[int]) -> str:
    """Return all values that occur, ascending."""
    return " or ".join(f"{value:,}" for value in sorted(set(values))) or "none"


def show(parts: Sequence[str], output: Path | None) -> None:
    """Print paragraphs and tables; also write them to a file, if one is named."""
    text = "\n\n".join(parts) + "\n"
    print(text)
    if output:
        output.write_text(text)
