"""Sizes of the source: lines by part, the largest functions, classes and files, and names with two meanings.

`make check` prints the report, and nobody fails by it: a limit is met by denser lines, a list is read.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from moe_ft.tables import table

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "product": ("moe_ft", "megatron", "pretrain_gpt_moe.py"),
    "tests": ("tests",),
    "benchmarks": ("benchmarks",),
    "tools, examples": ("tools", "examples"),
}
NUM_LARGEST = 10
Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def files_of(part: str) -> Iterator[Path]:
    """Yield the Python files of a part of the repository."""
    for name in PARTS[part]:
        path = ROOT / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def largest(sizes: dict[str, int]) -> str:
    """Return the largest of some named things as lines of text, with their numbers of lines."""
    ranked = sorted(sizes.items(), key=lambda item: -item[1])[:NUM_LARGEST]
    return "\n".join(f"  {lines:5d}  {name}" for name, lines in ranked)


def names_with_two_meanings(classes: list[str]) -> str:
    """Return the names that several classes have as lines of text, each with its files."""
    places = defaultdict(list)
    for each in classes:
        path, _, name = each.partition("::")
        places[name].append(path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    return "\n".join(f"  {name}: {', '.join(paths)}" for name, paths in sorted(shared.items()))


def main() -> None:
    """Print the report."""
    rows = []
    functions, classes, files = dict[str, int](), dict[str, int](), dict[str, int]()
    for part in PARTS:
        num_lines = num_comments = num_files = 0
        for path in files_of(part):
            text = path.read_text()
            lines = text.splitlines()
            num_files += 1
            num_lines += len(lines)
            num_comments += sum(line.lstrip().startswith("#") for line in lines)
            if part != "product":
                continue
            name = path.relative_to(ROOT).as_posix()
            files[name] = len(lines)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, Defined):
                    found = classes if isinstance(node, ast.ClassDef) else functions
                    found[f"{name}::{node.name}"] = (node.end_lineno or 0) - node.lineno + 1
        share = f"{100 * num_comments / num_lines:.1f} %"
        rows.append((part, f"{num_files:,}", f"{num_lines:,}", share))
    print(table(rows, ("part", "files", "lines", "lines of comments")))
    for title, sizes in (("functions", functions), ("classes", classes), ("files", files)):
        print(f"\nLargest {title} of the product, in lines:\n{largest(sizes)}")
    print(f"\nNames of more than one class of the product:\n{names_with_two_meanings([*classes])}")


if __name__ == "__main__":
    main()
