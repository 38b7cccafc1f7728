"""Cost of --moe-ft-breakpoints to training, and seconds per GiB of a breakpoint.

    python -m benchmarks.breakpoint [--pairs 4] [--iterations 30] [--gib 1] [--repeats 5]
        [--memory-dir /dev/shm] [--quick] [--output FILE.md]

Jobs with and without the flag take turns. Overhead is the quotient of the median iterations of a pair: the
flag copies a record twice in each iteration, and a breakpoint is written when a rank leaves, not before.

A breakpoint goes into memory that was touched before, as that of a job is, or into memory that was not. One
rank's state: BF16 weights, fp32 masters and moments of a few large parameters. What is timed is what
a rank does on its way out: header, copy, checksums, index. On a shared machine CPU seconds say more than the
clock. Median (range) of the attempts.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.conditions import conditions
from benchmarks.output import markdown_table, parse_options, show, spread
from benchmarks.paired_jobs import (
    COST_HEADERS,
    FIRST_ITERATION,
    LARGE,
    cost_columns,
    in_turns,
    iteration_times,
)
from benchmarks.sparse_jobs import NUM_RANKS, Changes, JobFolder, write_data
from moe_ft.engine.breakpoints import Breakpoints, Moment
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.regions import breakpoint_region
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.index import RecordLog, SnapshotIndexer
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.recovery.assembly import lay_out_breakpoint
from moe_ft.strategies.dense import DenseStrategy
from tests.demo_model import layout_flags
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_identity
from tests.unit.moe_ft.engine.engine_job import capture
from tests.unit.moe_ft.small_rank import SmallRank

_BYTES_PER_ELEMENT = 12  # master and moments
MODELS: dict[str, Changes] = {"demo": {}, "larger": LARGE}
TRAINING_HEADERS = ("model", *COST_HEADERS)
HEADERS = ("memory", "s per GiB", "CPU s per GiB")


def main() -> None:
    """Write breakpoints, and print how long each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--pairs", type=int, default=4, help="of jobs with and without the flag")
    parser.add_argument("--iterations", type=int, default=30, help="of each job")
    quick: dict[str, Any] = {
        "gib": 0.01,
        "repeats": 1,
        "pairs": 1,
        "iterations": FIRST_ITERATION + 3,
    }
    options = parse_options(parser, **quick)
    num_elements = int(options.gib * 2**30 / _BYTES_PER_ELEMENT / len(WINDOW_UNITS))
    rank = SmallRank(num_elements=num_elements)
    rank.step(1)
    described = f"{options.gib:g} GiB of masters and moments; median (range) of {options.repeats}"
    show(
        [
            conditions(f"{described}, and of {options.pairs} pairs of jobs."),
            "Training with the flag",
            markdown_table(_training_rows(options.pairs, options.iterations), TRAINING_HEADERS),
            "A breakpoint",
            markdown_table(_rows(rank, options.memory_dir, options.repeats), HEADERS),
        ],
        options.output,
    )


def _training_rows(num_pairs: int, num_iterations: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each model."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder))
        for name, changes in MODELS.items():

            def train(job: JobFolder, has_flag: bool, changes: Changes = changes) -> float:
                flags = [*layout_flags({"ep": NUM_RANKS}), *data, "--moe-ft-interval", "10"]
                flags += ["--moe-ft-breakpoints"] * has_flag
                return median(iteration_times(job, changes, NUM_RANKS, num_iterations, flags))

            yield name, *cost_columns(*in_turns(Path(folder), num_pairs, train))


def _rows(rank: SmallRank, memory_dir: Path, repeats: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kind of memory."""
    for kind in ("fresh", "touched"):
        wall_s, cpu_s = [], []
        for _ in range(repeats):
            folder = Path(tempfile.mkdtemp(prefix="moe_ft_benchmark_", dir=memory_dir))
            try:
                wall, cpu = _measure(rank, folder, kind)
            finally:
                shutil.rmtree(folder)
            wall_s.append(wall)
            cpu_s.append(cpu)
        yield kind, spread(wall_s, ".2f"), spread(cpu_s, ".2f")


def _measure(rank: SmallRank, folder: Path, kind: str) -> tuple[float, float]:
    """Write one breakpoint of the rank's state; return seconds and CPU seconds per GiB."""
    strategy = DenseStrategy(WINDOW_UNITS)
    layout = lay_out_breakpoint(strategy, UnitLayouts(rank.catalog(), 0))
    region = breakpoint_region(own_directory(folder, 0), layout.num_bytes)
    if kind == "touched":
        region.open()
    records = RecordLog(lambda record: None)
    breakpoints = Breakpoints(
        region,
        layout,
        StateCopier(rank.parameters, None, 0),
        SnapshotIndexer(make_identity(), 0, "node", rank.parameters, records),
        records,
        lambda: None,
    )
    breakpoints.start(is_in_use=False)
    plan = strategy.plan_breakpoint()
    breakpoints.note(Moment(record=capture(1), plan=plan, tokens=lambda: None))
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    if kind == "fresh":
        region.open()
    written = breakpoints.write()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert not written.problem, written.problem
    region.close()
    gib = written.num_bytes / 2**30
    return wall_s / gib, cpu_s / gib


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
