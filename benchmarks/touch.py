"""Time of a start for new memory on tmpfs, by the number of threads that touch it.

    python -m benchmarks.touch [--folders DIR ...] [--megabytes N] [--repetitions N] [--output FILE.md]

A new file is reserved, mapped and touched as at the first start of a rank: with one thread, and with those
that a rank has which is alone on its node, in turns. The third row is a start in a new process that finds the
file, the last one a repair, which takes up what its process has mapped. Folders on mounts with and
without huge=within_size show what huge pages change. Pinning needs a GPU and is not in it.
"""

import argparse
import tempfile
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

from benchmarks.conditions import ranks_on_cpu, versions
from benchmarks.output import markdown_table, parse_options, show, spread
from moe_ft.engine.memory import mappings
from moe_ft.engine.memory.job_directory import huge_pages
from moe_ft.engine.memory.mappings import Mappings
from moe_ft.processes import num_cores_of_rank


def measure(folder: Path, num_bytes: int, repetitions: int) -> dict[str, list[float]]:
    """Return seconds by what is measured."""
    threads = {
        f"new, {each} thread{'s' * (each > 1)}": each for each in (1, min(num_cores_of_rank(), 8))
    }
    found: dict[str, list[float]] = {name: [] for name in (*threads, "found", "taken up")}

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
        with closing(Mappings()) as memory:
            timed("found", memory)
            timed("taken up", memory)
    return found


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
