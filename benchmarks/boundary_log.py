"""Bytes of the boundary log against the formula, and the cost of logging to training.

    python -m benchmarks.boundary_log [--pairs N] [--iterations N] [--quick] [--output FILE.md]

Each case trains in pairs of runs, with and without --moe-ft-upstream-log, in turns, on the CPU over gloo.
Overhead is the median over pairs of the quotient of their median iterations. The time on the training thread
is measured around the calls of the log, so that it does not depend on what else the machine does.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

import pretrain_gpt_moe
from benchmarks.conditions import ranks_on_cpu, versions
from benchmarks.output import markdown_table, parse_options, show, spread
from benchmarks.paired_jobs import (
    COST_HEADERS,
    FIRST_ITERATION,
    LARGE,
    cost_columns,
    in_turns,
    iteration_times,
)
from benchmarks.sparse_jobs import Changes, JobFolder, write_data
from megatron.fault_tolerance.seams.megatron_loop import pipeline_traffic
from moe_ft.engine.boundary.log import BoundaryLog
from tests.demo_model import layout_flags
from tests.unit.moe_ft.engine.boundary.logs import open_log


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job: its layout and changes to the demo model."""

    layout: dict[str, int]
    changes: Changes
    flags: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.layout["pp"] * self.layout.get("ep", 1)


CASES = {
    "pp 2": Case(layout={"pp": 2}, changes=LARGE),
    "pp 2, 2 chunks": Case(
        layout={"pp": 2}, changes=LARGE, flags=("--num-virtual-stages-per-pipeline-rank", "2")
    ),
    "pp 4": Case(layout={"pp": 4}, changes=LARGE),
    "pp 2, ep 2, demo": Case(layout={"pp": 2, "ep": 2}, changes={}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """Contents of one rank's log at the end of a run, and its cost to the training thread.

    Attributes:
        sent: tensors and bytes of one iteration, in all of which they are the same.
        computed: tensors and bytes by the formula.
        memory_bytes: of all slots.
        seconds: ``[iteration]`` that the training thread spent in the log.
    """

    sent: tuple[int, int]
    computed: tuple[int, int]
    memory_bytes: int
    seconds: tuple[float, ...]


def train_and_measure(folder: str, flags: list[str]) -> None:
    """Train; write what `Logged` holds. Runs on every rank."""
    seconds: list[float] = []

    def timed(original: Callable[..., Any], *, begins: bool = False) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start_s = time.perf_counter()
            result = original(*args)
            if begins:
                seconds.append(0.0)
            seconds[-1] += time.perf_counter() - start_s
            return result

        return call

    close = BoundaryLog.close

    def close_and_write(self: BoundaryLog, timeout_s: float) -> None:
        close(self, timeout_s)
        slots = [*self._extents.values()]
        found, problems = open_log(slots[0].data_path.parent)
        assert not problems, problems
        sizes = {
            (len(each.index.sent), sum(sent.num_bytes for sent in each.index.sent))
            for each in found.values()
        }
        (sent,) = sizes
        traffic = pipeline_traffic(get_args())
        rank, stage = dist.get_rank(), get_args().rank * traffic.num_stages // dist.get_world_size()
        measured = {
            "sent": sent,
            "computed": (traffic.num_sends(stage), traffic.sent_bytes(stage)),
            "memory_bytes": sum(slot.num_bytes for slot in slots),
            "seconds": seconds[FIRST_ITERATION:],
        }
        Path(folder, f"log_{rank}.json").write_text(json.dumps(measured))
        dist.barrier()  # the first rank of a node removes the memory of all when it is done

    changed: Any = BoundaryLog
    changed.begin = timed(BoundaryLog.begin, begins=True)
    changed.record, changed.end = timed(BoundaryLog.record), timed(BoundaryLog.end)
    changed.close = close_and_write
    pretrain_gpt_moe.main(flags)


def train_case(
    case: Case, data: Sequence[str], num_iterations: int, job: JobFolder, logs: bool
) -> tuple[float, list[Logged]]:
    """Return the median iteration of rank 0 in seconds, and what each rank has logged, if they log."""
    flags = [*layout_flags(case.layout), *case.flags, *data, "--moe-ft-interval", "2"]
    flags += ["--moe-ft-upstream-log"] * logs
    train = partial(train_and_measure, str(job.log)) if logs else None
    times = iteration_times(job, case.changes, case.num_ranks, num_iterations, flags, train)
    logged = []
    for rank in range(case.num_ranks) if logs else ():
        found = json.loads((job.log / f"log_{rank}.json").read_text())
        logged.append(Logged(**{name: _tuple(value) for name, value in found.items()}))
    return median(times), logged


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def measure(
    name: str, case: Case, data: Sequence[str], folder: Path, *, num_pairs: int, num_iterations: int
) -> tuple[list[list[str]], list[str]]:
    """Return a row for each stage on bytes, and one for the case on times."""
    logged: list[Logged] = []

    def train(job: JobFolder, logs: bool) -> float:
        seconds, found = train_case(case, data, num_iterations, job, logs)
        logged[:] = found or logged
        return seconds

    without, with_log = in_turns(folder, num_pairs, train)
    per_stage = case.num_ranks // case.layout["pp"]
    rows = []
    for rank in range(0, case.num_ranks, per_stage):
        own = logged[rank]
        rows.append(
            [
                *(name, str(rank // per_stage), str(own.sent[0]), f"{own.sent[1]:,}"),
                *(f"{own.computed[1]:,}", f"{own.memory_bytes:,}"),
            ]
        )
    thread_ms = [1000 * seconds for own in logged for seconds in own.seconds]
    times = [name, *cost_columns(without, with_log), spread(thread_ms, ".2f")]
    return rows, times


def main() -> None:
    """Measure all cases and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    options = parse_options(parser, cases=["pp 2"], pairs=1, iterations=5)
    size_rows: list[list[str]] = []
    time_rows: list[list[str]] = []
    started = f"{ranks_on_cpu()}. {versions()}."
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder))
        for name in options.cases:
            rows, times = measure(
                *(name, CASES[name], data, Path(folder)),
                num_pairs=options.pairs,
                num_iterations=options.iterations,
            )
            size_rows += rows
            time_rows.append(times)
    sizes = ("case", "stage", "tensors", "logged bytes", "formula", "memory of the log")
    times_headers = ("case", *COST_HEADERS, "training thread in the log, ms")
    show(
        [
            "# Boundary log",
            started,
            "Bytes of one iteration and rank; the memory holds all slots, with headers.",
            markdown_table(size_rows, sizes),
            f"Medians and ranges of {options.pairs} pairs of {options.iterations} iterations.",
            markdown_table(time_rows, times_headers),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
