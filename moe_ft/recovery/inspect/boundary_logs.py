"""Boundary logs below a directory, for `inspect` and `verify`: what ranks have sent to other stages.

They are no state: without them a recovery only computes more. State is holdings.py and verification.py.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from moe_ft.engine.boundary.reading import LoggedIteration, open_slot
from moe_ft.engine.memory.job_directory import find_indexes_below
from moe_ft.format.boundary import BoundaryIndex
from moe_ft.tables import table


def find_logs(directory: str) -> Iterator[tuple[Path, LoggedIteration | str]]:
    """Yield the indexes below a directory, each with what it describes, or why that cannot be read."""
    for path, index in find_indexes_below(Path(directory), BoundaryIndex):
        if path.is_dir():
            continue  # holdings.py says that it is not ours
        try:
            yield path, open_slot(path, index)
        except OSError as error:
            yield path, str(error)


def render_logs(directory: str) -> str:
    """Return a table of the boundary logs below a directory, empty if there are none."""
    logs: dict[tuple[int, str], list[LoggedIteration]] = defaultdict(list)
    problems = []
    for path, found in find_logs(directory):
        if isinstance(found, str):
            problems.append((path.parent.name, "-", "-", "-", found))
        else:
            logs[found.index.rank, str(path.parent)].append(found)
    rows = [
        (
            rank,
            ", ".join(str(each) for each in sorted(logged.index.iteration for logged in own)),
            sum(len(logged.index.sent) for logged in own),
            f"{sum(sent.num_bytes for each in own for sent in each.index.sent) / 2**20:.1f}",
            place,
        )
        for (rank, place), own in sorted(logs.items(), key=lambda item: item[0])
    ]
    if not rows and not problems:
        return ""
    headers = ("boundary log of rank", "iterations", "tensors", "MiB", "where")
    return table([*rows, *problems], headers)


def verify_logs(directory: str) -> tuple[list[str], list[str]]:
    """Read all boundary logs below a directory; return lines on what is right, and on what is wrong."""
    right, wrong = [], []
    for path, found in find_logs(directory):
        if isinstance(found, str):
            wrong.append(f"boundary log {path}: {found}")
            continue
        index = found.index
        try:
            found.check()
        except OSError as error:
            wrong.append(f"boundary log {path}: {error}")
        else:
            what = f"boundary log of iteration {index.iteration}, rank {index.rank} ({path})"
            right.append(f"{what}: {len(index.sent)} tensors")
    return right, wrong
