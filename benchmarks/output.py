"""Options and output of benchmarks: what all of them can do, and paragraphs and tables on a page."""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
# The line at the head of a page that says what was measured.
STAMP = re.compile(
    r"^Figures of commit `([0-9a-f]{7,40})`(?: with changes)?, (\d{4}-\d\d-\d\d)\.", re.M
)
_MEASURED = ("moe_ft", "megatron", "benchmarks", "tests", "pretrain_gpt_moe.py")


def parse_options(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None, **quick: object
) -> argparse.Namespace:
    """Add --quick and --output, and return the options.

    Args:
        parser: of the other options.
        words: the command line, that of the process by default.
        quick: what --quick changes: sizes with which it only takes seconds; named options go before.
    """
    parser.add_argument("--quick", action="store_true", help="little, to see that it works")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="a page for the tables")
    options = parser.parse_args(words)
    if not options.quick:
        return options
    if options.output:
        parser.error("--output does not go with --quick, whose figures say nothing: leave one out")
    parser.set_defaults(**quick)
    return parser.parse_args(words)


def git(*words: str) -> str:
    """Return what git prints about the checkout, whoever owns it.

    Raises:
        subprocess.CalledProcessError: outside a git checkout.
    """
    command = ("git", "-c", f"safe.directory={ROOT}", *words)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def stamp() -> str:
    """Return the line for the head of a page: of which commit the figures are that are taken now.

    Raises:
        subprocess.CalledProcessError: outside a git checkout.
    """
    is_changed = git("status", "--porcelain", "--untracked-files=no", "--", *_MEASURED)
    commit = f"`{git('rev-parse', '--short', 'HEAD')}`{' with changes' if is_changed else ''}"
    return f"Figures of commit {commit}, {date.today()}."


def markdown_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Return a table in GitHub's Markdown, with all cells as they are given."""
    cells = [[*headers], *([f"{cell}" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells]
    return "\n".join([lines[0], f"|{'|'.join('-' * (w + 2) for w in widths)}|", *lines[1:]])


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the median and, in brackets, the range; '-' for nothing."""
    if not values:
        return "-"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def distinct(values: Iterable[int]) -> str:
    """Return all values that occur, ascending."""
    return " or ".join(f"{value:,}" for value in sorted(set(values))) or "none"


def show(parts: Sequence[str], output: Path | None) -> None:
    """Print paragraphs and tables; if a page is named, also write them there, below a stamp.

    Of a page that exists its text above the stamp stays: the title and what is said of the figures. A new
    one begins with the docstring of the benchmark.
    """
    text = "\n\n".join(parts) + "\n"
    print(text)
    if output:
        known = output.read_text() if output.exists() else ""
        found = STAMP.search(known)
        title, _, about = str(sys.modules["__main__"].__doc__).partition(".\n\n")
        head = known[: found.start()] if found else f"# {title}\n\n{about}\n"
        output.write_text(f"{head}{stamp()}\n\n{text}")
