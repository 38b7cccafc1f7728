"""Seconds per iteration and memory per rank of each layout, and what the seams cost.

    python -m benchmarks.layouts [--iterations N] [--repetitions N] [--most-ranks N] [--quick]
        [--output FILE.md]

Both figures come from Megatron's own timer ("elapsed time per iteration"), the first two iterations left
out. The seams are compared with the same job of the tests' stock program, which has none, in turns.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.conditions import conditions
from benchmarks.output import markdown_table, parse_options, show
from benchmarks.quickstart import SIZES
from benchmarks.sparse_jobs import write_data
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import JobResult, events, run_ranks, run_training
from tests.stock import train_and_digest

_ITERATION = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
_WARM_UP = 2

SEQUENCE_PARALLEL = {"sequence_parallel": True}
LAYOUTS: tuple[tuple[int, dict[str, int], dict[str, bool]], ...] = (
    (1, {}, {}),
    (2, {}, {}),
    (2, {"pp": 2}, {}),
    (2, {"ep": 2}, {}),
    (2, {"tp": 2, "etp": 1}, SEQUENCE_PARALLEL),
    (2, {"tp": 2, "etp": 2}, SEQUENCE_PARALLEL),
    (4, {"pp": 2, "ep": 2}, {}),
    (4, {"tp": 2, "ep": 2, "etp": 1}, SEQUENCE_PARALLEL),
    (8, {"pp": 2, "ep": 2}, {}),
    (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, SEQUENCE_PARALLEL),
)


LAYOUT_HEADERS = ("layout", "ranks", "s per iteration", "peak memory per rank, MiB")
SEAM_HEADERS = ("pp2 x ep2, median of each job", "s per iteration", "ratio, pair by pair")


def iteration_seconds(result: JobResult) -> list[float]:
    """Return what the last rank printed, warm iterations only."""
    milliseconds = _ITERATION.findall(result.output(len(result.log_paths) - 1))
    return [float(value) / 1000 for value in milliseconds[_WARM_UP:]]


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the median and, in brackets, the range."""
    return f"{median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def layout_rows(
    data: Sequence[str], iterations: int, most_ranks: int, folder: Path
) -> Iterator[tuple[str, ...]]:
    """Train every layout and yield its row."""
    for number, (ranks, layout, changes) in enumerate(LAYOUTS):
        if ranks > most_ranks:
            continue
        log_dir = folder / f"layout_{number}"
        flags = model_flags(**SIZES, **changes, train_iters=iterations)
        flags += [*layout_flags(layout), *data, *event_flags(log_dir)]
        result = run_training(flags, ranks, log_dir=log_dir, deadline_s=600).check()
        peaks = [
            events(log_dir, rank, "end")[-1]["peak_device_memory_bytes"] / 2**20
            for rank in range(ranks)
        ]
        yield (name_of(layout), str(ranks), spread(iteration_seconds(result)), spread(peaks, ".0f"))


def seam_rows(
    data: Sequence[str], iterations: int, repetitions: int, folder: Path
) -> Iterator[tuple[str, ...]]:
    """Train with and without the seams in turns and yield the comparison."""
    flags = model_flags(**SIZES, train_iters=iterations) + layout_flags({"pp": 2, "ep": 2})
    flags += data
    medians: dict[bool, list[float]] = {False: [], True: []}
    for repetition in range(repetitions):
        for with_seams in (False, True):
            log_dir = folder / f"seams_{repetition}_{with_seams}"
            more = ["--moe-ft-event-log", str(log_dir / "events")] if with_seams else []
            arguments = (flags + more, not with_seams, str(log_dir))
            result = run_ranks(train_and_digest, 4, *arguments, log_dir=log_dir, deadline_s=600)
            medians[with_seams].append(median(iteration_seconds(result.check())))
    ratios = [a / b for a, b in zip(medians[True], medians[False], strict=True)]
    yield ("without seams", spread(medians[False]), "")
    yield ("with seams and event log", spread(medians[True]), spread(ratios))


def name_of(layout: Mapping[str, int]) -> str:
    """Return a layout as text."""
    return " x ".join(f"{name}{size}" for name, size in layout.items()) or "dp only"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--most-ranks", type=int, default=8, help="of the first table")
    options = parse_options(parser, iterations=4, repetitions=1, most_ranks=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder)
        layouts = layout_rows(data, options.iterations, options.most_ranks, folder)
        seams = seam_rows(data, options.iterations, options.repetitions, folder)
        parts = [
            conditions(f"Iterations {_WARM_UP + 1} to {options.iterations}; median (range)."),
            markdown_table(layouts, LAYOUT_HEADERS),
            markdown_table(seams, SEAM_HEADERS),
        ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
