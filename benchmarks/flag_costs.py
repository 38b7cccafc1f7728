"""Cost of flags to training: jobs with and without a flag take turns, on the CPU over gloo, no failures.

    python -m benchmarks.flag_costs [--flags NAME ...] [--pairs N] [--iterations N] [--quick]
        [--output FILE.md]

log          --moe-ft-upstream-log, by layout. local_recovery.py has the bytes of the log
breakpoints  --moe-ft-breakpoints: a record is copied twice in each iteration; a breakpoint is written when a
             rank leaves, not before
repair       --moe-ft-repair auto under `moe_ft keep`: all ranks meet at the end of each iteration
checks       --moe-ft-check-iterations and --moe-ft-check-weights. The first is one forward and backward pass
             in N iterations, all of an iteration at most; the second is a pass over the state

Overhead is the quotient of the median iterations of rank 0 in the two jobs of a pair, less one; median
(range) over pairs. With a check that is not in every iteration it is that of means of so many iterations.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median

from benchmarks.jobs import (
    DEADLINE_S,
    MODELS,
    SCRIPT,
    Changes,
    JobFolder,
    data_folder,
    job_folder,
    run_under_torchrun,
)
from benchmarks.output import conditions, markdown_table, read_options, show, spread
from tests.demo_model import layout_flags, model_flags
from tests.harness import events, run_training

FIRST_ITERATION = 3  # those before are slower in each process
HEADERS = ("flag", "job", "iteration without, s", "with, s", "overhead")
_CHECKED: Changes = {
    "hidden_size": 256,
    "moe_ffn_hidden_size": 512,
    "seq_length": 64,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A flag and a job that has it or not.

    Attributes:
        flag: with its values.
        flags: that the job has anyway.
        period: iterations of which the flag costs as much as in the next ones.
        keeps: whether the ranks are forked by `moe_ft keep`.
    """

    flag: Sequence[str]
    job: str
    flags: Sequence[str] = ()
    model: Changes = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=lambda: {"ep": 2})
    num_ranks: int = 2
    period: int = 1
    keeps: bool = False

    def iteration_s(
        self, data: Sequence[str], num_iterations: int, job: JobFolder, *, has_flag: bool
    ) -> float:
        """Train once; return the seconds of rank 0's iterations."""
        ranks = self.num_ranks
        words = [
            *model_flags(**{**self.model, "train_iters": num_iterations}),
            *(*layout_flags(self.layout), *data, *self.flags, *(self.flag if has_flag else ())),
            *("--moe-ft-event-log", str(job.events), *job.strategy_flags("dense")),
        ]
        if self.keeps:
            words, log = [SCRIPT, *words], job.log / "output"
            run_under_torchrun(words, ranks, max_restarts=0, log_path=log, keeps=True)
        else:
            logs = job.log / "logs"
            run_training(words, ranks, log_dir=logs, deadline_s=DEADLINE_S).check()
        times = [each["iteration_s"] for each in events(job.events, 0, "iteration")]
        times = times[FIRST_ITERATION:]
        ends = range(self.period, len(times) + 1, self.period)
        return median(fmean(times[end - self.period : end]) for end in ends)


FLAGS: dict[str, Sequence[Compared]] = {
    "log": [
        Compared(
            flag=("--moe-ft-upstream-log",),
            job=name,
            flags=("--moe-ft-interval", "2", *flags),
            model=model,
            layout=layout,
            num_ranks=layout["pp"] * layout.get("ep", 1),
        )
        for name, layout, model, flags in (
            ("pp 2", {"pp": 2}, MODELS["larger"], ()),
            (
                "pp 2, 2 chunks",
                {"pp": 2},
                MODELS["larger"],
                ("--num-virtual-stages-per-pipeline-rank", "2"),
            ),
            ("pp 4", {"pp": 4}, MODELS["larger"], ()),
            ("pp 2, ep 2, demo", {"pp": 2, "ep": 2}, MODELS["demo"], ()),
        )
    ],
    "breakpoints": [
        Compared(
            flag=("--moe-ft-breakpoints",),
            job=name,
            flags=("--moe-ft-interval", "10"),
            model=MODELS[name],
        )
        for name in ("demo", "larger")
    ],
    "repair": [
        Compared(
            flag=("--moe-ft-repair", "auto"),
            job=f"{num_ranks} ranks",
            layout={"pp": 2, "ep": num_ranks // 2},
            num_ranks=num_ranks,
            keeps=True,
        )
        for num_ranks in (2, 4, 8)
    ],
    "checks": [
        Compared(flag=(flag, f"{every}"), job="2 ranks", layout={}, model=_CHECKED, period=every)
        for flag in ("--moe-ft-check-iterations", "--moe-ft-check-weights")
        for every in (1, 4)
    ],
}


def cost_rows(
    compared: Sequence[Compared], data: Sequence[str], folder: Path, pairs: int, iterations: int
) -> Iterator[tuple[str, ...]]:
    """Yield a row for each flag and job."""
    for each in compared:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(pairs):
            for has_flag in (False, True) if number % 2 else (True, False):
                print(*each.flag, each.job, has_flag, file=sys.stderr, flush=True)
                with job_folder(folder) as job:
                    train = partial(each.iteration_s, data, iterations, job)
                    seconds[has_flag].append(train(has_flag=has_flag))
        ratios = [after / before - 1 for before, after in zip(*seconds.values(), strict=True)]
        cells = spread(seconds[False]), spread(seconds[True]), spread(ratios, "+.1%")
        yield " ".join(each.flag), each.job, *cells


def main() -> None:
    """Run all jobs and print the table."""
    options = read_options(
        flags=(list(FLAGS), ["breakpoints"]),
        pairs=(4, 1, "of jobs with and without the flag"),
        iterations=(30, FIRST_ITERATION + 4, "of each job"),
    )
    say = conditions(f"Median (range) of {options.pairs} pairs of {options.iterations} iterations.")
    with data_folder() as (folder, data):
        compared = [each for name in options.flags for each in FLAGS[name]]
        if options.quick:
            compared = compared[:1]
        rows = [*cost_rows(compared, data, folder, options.pairs, options.iterations)]
    show([say, markdown_table(rows, HEADERS)], options.output)


if __name__ == "__main__":
    main()
