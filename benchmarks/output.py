"""Options and output of benchmarks: what all of them can do, and paragraphs and tables on a page."""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

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


def read_options(
    words: Sequence[str] | None = None, **flags: tuple[Any, ...]
) -> argparse.Namespace:
    """Return the options of the benchmark that runs; its docstring has the description.

    Args:
        words: the command line, that of the process by default.
        flags: by name the default, the value with --quick where that differs, and help. The default says
            the type; words in a list are the choices, and an empty one stands for texts.
    """
    about = str(sys.modules["__main__"].__doc__)
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    quick = {}
    for name, (default, *more) in flags.items():
        if more:
            quick[name] = more[0]
        given: dict[str, Any] = {"default": default, "help": more[1] if len(more) > 1 else None}
        if isinstance(default, bool):
            given["action"] = "store_true"
        elif isinstance(default, list):
            given |= {"nargs": "+", "type": type(default[0])}
            if isinstance(default[0], str) and all(default):
                given["choices"] = default
        else:
            given["type"] = Path if default is None else type(default)
        parser.add_argument("--" + name.replace("_", "-"), **given)
    return parse_options(parser, words, **quick)


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


def conditions(measured: str) -> str:
    """Return the conditions of a benchmark that starts now, for the first paragraph of its output.

    Args:
        measured: sentences about what is measured.
    """
    return f"{ranks_on_cpu()}. {date.today()}. {measured} {versions()}."


def ranks_on_cpu() -> str:
    """Return what the ranks of a job share, and how busy it is now."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, one thread a rank, gloo, no GPU; load at the start {load:.1f}"


def versions() -> str:
    """Return the versions of what all jobs run on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    return f"Python {platform.python_version()}, {packages}"


def markdown_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Return a table in GitHub's Markdown, with all cells as they are given."""
    cells = [[*headers], *([f"{cell}" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells]
    return "\n".join([lines[0], f"|{'|'.join('-' * (w + 2) for w in widths)}|", *lines[1:]])


def take_turns(
    functions: Mapping[str, Callable[[], object]],
    repetitions: int,
    prepare: Callable[[], object] = lambda: None,
    finish: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of functions by name, which take turns, back and forth; the first does not count.

    Args:
        prepare: called before each of them, not timed.
        finish: called after each of them, and timed.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repetitions + 1):
        for name in list(functions)[:: 1 if turn % 2 else -1]:
            prepare()
            begin_s = time.perf_counter()
            functions[name]()
            finish()
            if turn:
                samples[name].append(time.perf_counter() - begin_s)
    return samples


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
