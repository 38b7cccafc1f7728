"""Time of a start for new memory on tmpfs, by the number of threads that touch it.

    python -m benchmarks.touch [--folders DIR ...] [--megabytes N] [--repetitions N] [--output FILE.md]

A new file is reserved, mapped and touched as at the first start of a rank: with one thread, and with those
that a rank has which is alone on its node, in turns. The other rows are of a repair: in the replacement of a
rank, a new process that finds the file, and in the others, which take up what they have mapped. A replacement
touches the file later, in a thread; the row "touched" has what it would wait for otherwise. "other thread"
has how long another thread of the replacement stood still meanwhile, at most. Folders on mounts with and
without huge=within_size show what huge pages change. Pinning needs a GPU and is not in it.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from unittest import mock

from benchmarks.conditions import ranks_on_cpu, versions
from benchmarks.output import markdown_table, parse_options, show, spread
from moe_ft.engine.memory import mappings
from moe_ft.engine.memory.job_directory import huge_pages
from moe_ft.engine.memory.mappings import Mappings
from moe_ft.processes import num_cores_of_rank

TOUCHED, FOUND = "replacement, touched", "replacement"
OTHER, TAKEN_UP = "replacement, other thread", "survivor"
_LOOK_S = 0.001


def measure(folder: Path, num_bytes: int, repetitions: int) -> dict[str, list[float]]:
    """Return seconds by what is measured."""
    threads = {
        f"new, {each} thread{'s' * (each > 1)}": each for each in (1, min(num_cores_of_rank(), 8))
    }
    found: dict[str, list[float]] = {
        name: [] for name in (*threads, TOUCHED, FOUND, OTHER, TAKEN_UP)
    }

    def timed(name: str, memory: Mappings) -> None:
        begin_s = time.perf_counter()
        memory.open(folder / "file", num_bytes)
        found[name].append(time.perf_counter() - begin_s)

    for _ in range(repetitions):
        for name, num_threads in threads.items():
            (folder / "file").unlink(missing_ok=True)
            with (
                closing(Mappings()) as memory,
                mock.patch.object(mappings, "num_cores_of_rank", lambda each=num_threads: each),
            ):
                timed(name, memory)
        with (
            closing(Mappings()) as memory,
            mock.patch.object(mappings, "_has_pages", lambda *_: False),
        ):
            timed(TOUCHED, memory)
        with closing(Mappings()) as memory, _longest_gap(found[OTHER]):
            timed(FOUND, memory)
            _touch(memory)
            timed(TAKEN_UP, memory)
    return found


def _touch(memory: Mappings) -> None:
    before = set(threading.enumerate())
    memory.touch_later()
    for thread in set(threading.enumerate()) - before:
        thread.join()


@contextmanager
def _longest_gap(gaps: list[float]) -> Iterator[None]:
    """Add the longest time for which another thread did not run in this context."""
    has_ended, seconds = threading.Event(), [time.perf_counter()]

    def run() -> None:
        while not has_ended.wait(_LOOK_S):
            seconds.append(time.perf_counter())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        gaps.append(
            max(after - before for before, after in pairwise([*seconds, time.perf_counter()]))
        )


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folders", type=Path, nargs="+", default=[Path("/dev/shm")], metavar="DIR"
    )
    parser.add_argument("--megabytes", type=int, default=3072)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parse_options(parser, megabytes=256, repetitions=1)
    rows = []
    for place in options.folders:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            found = measure(Path(folder), options.megabytes << 20, options.repetitions)
        rows += [(huge_pages(place)[0], name, spread(each, ".4f")) for name, each in found.items()]
    about = f"{ranks_on_cpu()}. {options.megabytes} MiB, median (range) of {options.repetitions}."
    table = markdown_table(rows, ("huge=", "memory", "s"))
    show([f"{about} {versions()}.", table], options.output)


if __name__ == "__main__":
    main()
