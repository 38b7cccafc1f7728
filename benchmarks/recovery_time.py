"""Seconds from a kill until training runs again: restarts, restarts with `keep`, repairs, and a peer.

    python -m benchmarks.recovery_time [--ranks N ...] [--kinds NAME ...] [--parts NAME ...] [--repeats N]
        [--failures N] [--failure-every N] [--barrier-iterations N] [--nvrx DIR] [--quick] [--output FILE.md]

recovery  Each job trains the demo model of the tests in pretrain_gpt_moe.py. Its highest rank is killed in
          the backward of an iteration, --repeats times. benchmarks/recovery_moments.py has what is
          measured, and checks that each kill was answered as it should be.
ettr      The job of examples/quickstart.sh on 4 ranks, killed every 100 iterations, --failures times.
          ETTR is the time of all iterations, each once and as long as the median one, over the time from
          the beginning of the first to the end of the last.
barrier   Seconds of an iteration with and without `--moe-ft-repair auto`, and no failure, in jobs that take
          turns.

All jobs of a part and size must end in the same state, bit for bit. Kinds:

restart    torchrun starts all ranks again; those that it ends wait for nobody's report
keep       the same under `moe_ft keep`
repair     --moe-ft-repair auto, strategy dense
whole      the same with whole survivors: strategy sparse, --moe-ft-recovery local
nvrx       the in-process wrapper of nvidia-resiliency-ext with its own intervals of 1 s, and the same program
           (benchmarks/inprocess_rank.py); from the folder --nvrx. A reserve rank waits for each kill, so
           its jobs have three kills each, and as many jobs as it takes
nvrx-fast  the same with intervals of 0.1 s

A kind that is refused or not installed is left out, with the reason. So is one that fails; the exit code is
then 1.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import batched
from pathlib import Path
from statistics import median

from benchmarks.conditions import conditions
from benchmarks.event_logs import digests_of
from benchmarks.output import distinct, markdown_table, parse_options, show, spread
from benchmarks.quickstart import MODEL
from benchmarks.recovery_jobs import (
    KINDS,
    REFERENCE,
    Job,
    NotRunError,
    Result,
    kills_of,
    run_job,
)
from benchmarks.recovery_moments import (
    REPAIR_PHASES,
    RESTART_PHASES,
    Answer,
    Efficiency,
    Moments,
    check_answers,
    efficiency_of,
    iteration_times,
    read_moments,
)
from benchmarks.sparse_jobs import write_data

RECOVERY, ETTR, BARRIER = "recovery", "ettr", "barrier"
PARTS = (RECOVERY, ETTR, BARRIER)
TARGET_SHARE, TARGETS_S = 0.1, {4: 0.35, 8: 2.0}
ETTR_RANKS = 4
WARM_ITERATIONS = 5  # the first iterations of a process are slower

Row = tuple[str, ...]
Size = tuple[str, int]  # part and ranks


@dataclass(kw_only=True)
class Bench:
    """Runner of all jobs, with what has come of them.

    Attributes:
        not_run: lines about those that have not run.
        digests: by part and ranks, of the first job.
    """

    data: Sequence[str]
    folder: Path
    nvrx: Path
    not_run: list[str] = field(default_factory=list)
    has_failed: bool = False
    digests: dict[Size, tuple[str, object]] = field(default_factory=dict)

    def run[Read](self, part: str, job: Job, read: Callable[[Result], Read]) -> Read | None:
        """Run a job, check it and read what it has left; None if it has not run, or not as it should."""
        name = f"{part}, {job.num_ranks} ranks, {job.kind}"
        print(name, file=sys.stderr, flush=True)
        try:
            result = run_job(job, self.data, self.folder, self.nvrx)
            check_answers(result.logs, job.expected)
            self._check_digests((part, job.num_ranks), job.kind, digests_of(result.logs))
            return read(result)
        except NotRunError as error:
            self.not_run.append(f"- {name}: not run: {error}")
        except AssertionError as error:
            self.has_failed = True
            print(error, file=sys.stderr, flush=True)
            self.not_run.append(f"- {name}: FAILED: {(str(error).splitlines() or ['?'])[0]}")
        return None

    def _check_digests(self, size: Size, kind: str, digests: object) -> None:
        other, known = self.digests.setdefault(size, (kind, digests))
        assert digests == known, f"{kind} ends in another state than {other}"


# --- recoveries


def measure_recoveries(
    bench: Bench, num_ranks: int, kinds: Sequence[str], repeats: int
) -> dict[str, list[Moments]]:
    """Return the moments of all kills, by kind."""
    kills = kills_of(repeats)
    # All kinds could be wrong in the same way: the first digests are those of a job without a kill.
    bench.run(RECOVERY, _job("keep", num_ranks, (), kills[-1] + 3), lambda result: True)
    found: dict[str, list[Moments]] = {}
    for kind in kinds:
        for kills_of_job in batched(kills, KINDS[kind].num_reserves or len(kills)):
            job = _job(kind, num_ranks, kills_of_job, kills[-1] + 3)
            moments = bench.run(RECOVERY, job, partial(_moments, job))
            if moments is not None:
                found.setdefault(kind, []).extend(moments)
                shown = ", ".join(f"{each.iteration_s:.2f}" for each in moments)
                print(f"    to the first new iteration: {shown} s", file=sys.stderr, flush=True)
    return found


def _moments(job: Job, result: Result) -> list[Moments]:
    return read_moments(result.logs, job.expected, result.called_s)


def _job(kind: str, num_ranks: int, kills: Sequence[int], num_iterations: int) -> Job:
    return Job(kind=kind, num_ranks=num_ranks, kills=kills, num_iterations=num_iterations)


RECOVERY_HEADERS = (
    *("ranks", "kind", "to the loop, s", "to the first new iteration, s", "redone iterations"),
    *("of restart", "target"),
)


def recovery_rows(num_ranks: int, found: Mapping[str, Sequence[Moments]]) -> Iterator[Row]:
    """Yield a row for each kind."""
    reference = found.get(REFERENCE)
    for kind, moments in found.items():
        loop_s = median(each.loop_s for each in moments)
        share = loop_s / median(each.loop_s for each in reference) if reference else None
        yield (
            *(str(num_ranks), KINDS[kind].title),
            spread([each.loop_s for each in moments], ".2f"),
            spread([each.iteration_s for each in moments], ".2f"),
            distinct(each.num_redone for each in moments),
            "-" if share is None else f"{share:.0%}",
            target(num_ranks, loop_s, share) if KINDS[kind].answer is Answer.REPAIR else "",
        )


def target(num_ranks: int, loop_s: float, share: float | None) -> str:
    """Return the targets of a repair, and which of them it meets."""
    parts = [] if share is None else [(f"{TARGET_SHARE:.0%}", share <= TARGET_SHARE)]
    if num_ranks in TARGETS_S:
        parts.append((f"{TARGETS_S[num_ranks]:g} s", loop_s <= TARGETS_S[num_ranks]))
    return ", ".join(f"{name}: {'met' if is_met else 'missed'}" for name, is_met in parts)


def phase_headers(phases: Sequence[str]) -> Row:
    """Return the headers of a table of phases."""
    return ("ranks", "kind", *(f"{name}, s" for name in phases))


def phase_rows(
    num_ranks: int, found: Mapping[str, Sequence[Moments]], phases: Sequence[str]
) -> Iterator[Row]:
    """Yield the median seconds of each phase, for the kinds that have these phases."""
    for kind, moments in found.items():
        if tuple(moments[0].phases_s) == tuple(phases):
            medians = (median(each.phases_s[name] for each in moments) for name in phases)
            yield str(num_ranks), KINDS[kind].title, *(f"{seconds:.2f}" for seconds in medians)


def recovery_tables(found: Mapping[int, Mapping[str, Sequence[Moments]]]) -> list[str]:
    """Return the tables of recoveries, by ranks and kind."""
    parts = [
        "Seconds from the kill",
        markdown_table(
            [row for ranks, kinds in found.items() for row in recovery_rows(ranks, kinds)],
            RECOVERY_HEADERS,
        ),
    ]
    for title, phases in (("Restarts", RESTART_PHASES), ("Repairs", REPAIR_PHASES)):
        rows = [row for ranks, kinds in found.items() for row in phase_rows(ranks, kinds, phases)]
        if rows:
            parts += [f"{title} by phase", markdown_table(rows, phase_headers(phases))]
    return parts


# --- useful time


ETTR_HEADERS = ("kind", "ETTR", "iterations", "failures", "wall, s", "median iteration, s")


def measure_efficiency(
    bench: Bench, kinds: Sequence[str], num_failures: int, every: int
) -> dict[str, Efficiency]:
    """Return the efficiency of the demo job, by kind."""
    kills = [every * (number + 1) for number in range(num_failures)]
    found = {}
    for kind in kinds:
        job = Job(
            kind=kind,
            num_ranks=ETTR_RANKS,
            kills=kills,
            num_iterations=kills[-1] + 1,
            model=MODEL,
        )
        efficiency = bench.run(ETTR, job, lambda result: efficiency_of(result.logs[0]))
        if efficiency is not None:
            found[kind] = efficiency
    return found


def ettr_rows(found: Mapping[str, Efficiency], num_failures: int) -> Iterator[Row]:
    """Yield a row for each kind."""
    for kind, each in found.items():
        yield (
            *(KINDS[kind].title, f"{each.ettr:.3f}", str(each.num_iterations), str(num_failures)),
            *(f"{each.wall_s:.1f}", f"{each.iteration_s:.3f}"),
        )


# --- the barrier


BARRIER_HEADERS = (
    *("ranks", "without, ms", "with, ms", "difference of pairs, ms", "of an iteration"),
)


def measure_barrier(
    bench: Bench, num_ranks: int, repeats: int, num_iterations: int
) -> list[tuple[float, float]]:
    """Return ``[pair]`` the median seconds of an iteration without and with the flag."""
    pairs = []
    for _ in range(repeats):
        seconds = []
        for kind in ("keep", "repair"):
            found = bench.run(BARRIER, _job(kind, num_ranks, (), num_iterations), _iteration_s)
            if found is not None:
                seconds.append(found)
        if len(seconds) == 2:
            pairs.append((seconds[0], seconds[1]))
    return pairs


def _iteration_s(result: Result) -> float:
    return median(iteration_times(result.logs[0])[WARM_ITERATIONS:])


def barrier_row(num_ranks: int, pairs: Sequence[tuple[float, float]]) -> Row:
    """Return the row of a size."""
    without, with_flag = ([1e3 * each for each in seconds] for seconds in zip(*pairs, strict=True))
    costs = [after - before for before, after in zip(without, with_flag, strict=True)]
    return (
        *(str(num_ranks), spread(without, ".1f"), spread(with_flag, ".1f")),
        *(spread(costs, ".1f"), f"{median(costs) / median(without):.1%}"),
    )


# --- all of it


def measure(options: argparse.Namespace, bench: Bench) -> list[str]:
    """Run all parts and return their tables."""
    parts = []
    if RECOVERY in options.parts:
        found = {
            ranks: measure_recoveries(bench, ranks, options.kinds, options.repeats)
            for ranks in options.ranks
        }
        parts += recovery_tables(found)
    if BARRIER in options.parts:
        pairs = {
            ranks: measure_barrier(bench, ranks, options.repeats, options.barrier_iterations)
            for ranks in options.ranks
        }
        rows = [barrier_row(ranks, each) for ranks, each in pairs.items() if each]
        parts += ["The barrier of --moe-ft-repair", markdown_table(rows, BARRIER_HEADERS)]
    if ETTR in options.parts:
        efficiency = measure_efficiency(
            bench, options.kinds, options.failures, options.failure_every
        )
        title = (
            f"Demo job on {ETTR_RANKS} ranks, a failure every {options.failure_every} iterations"
        )
        rows = list(ettr_rows(efficiency, options.failures))
        parts += [title, markdown_table(rows, ETTR_HEADERS)]
    return parts


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; --quick has changed some."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=5, help="kills of a kind, pairs of jobs")
    parser.add_argument("--failures", type=int, default=2, help="of the demo job")
    parser.add_argument("--failure-every", type=int, default=100, help="iterations of the demo job")
    parser.add_argument("--barrier-iterations", type=int, default=40, help="of each job")
    parser.add_argument("--nvrx", type=Path, default=Path("runs/nvrx"), metavar="DIR")
    options = parse_options(
        parser,
        words,
        ranks=[2],
        kinds=["repair"],
        repeats=1,
        failures=1,
        failure_every=10,
        barrier_iterations=WARM_ITERATIONS + 5,
    )
    if min(options.ranks) < 2 or any(ranks % 2 for ranks in options.ranks):
        parser.error(f"--ranks must be even numbers from 2, not {options.ranks}: half are stages")
    if options.repeats < 1 or options.failures < 1:
        parser.error("--repeats and --failures must be 1 or more")
    options.nvrx = options.nvrx.resolve()
    return options


def main() -> None:
    """Run all jobs and print the tables."""
    options = parse()
    parts = [conditions(f"Median (range) of {options.repeats}.")]
    with tempfile.TemporaryDirectory(prefix="recovery_time_") as name:
        data = write_data(Path(name))
        bench = Bench(data=data, folder=Path(name), nvrx=options.nvrx)
        parts += measure(options, bench)
    if bench.not_run:
        parts.append("\n".join(bench.not_run))
    show(parts, options.output)
    sys.exit(int(bench.has_failed))


if __name__ == "__main__":
    main()
