"""Output of benchmarks: paragraphs and tables, printed and written to a file on request."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate


def markdown_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Return a table in GitHub's Markdown, with all cells as they are given."""
    return tabulate(list(rows), headers, "github", disable_numparse=True)


def show(parts: Sequence[str], output: Path | None) -> None:
    """Print paragraphs and tables; also write them to a file, if one is named."""
    text = "\n\n".join(parts) + "\n"
    print(text)
    if output:
        output.write_text(text)
