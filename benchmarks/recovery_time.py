"""Seconds from a kill until training runs again: restarts, restarts with `keep`, repairs, and a peer.

    python -m benchmarks.recovery_time [--ranks N ...] [--kinds NAME ...] [--parts NAME ...] [--repeats N]
        [--failures N] [--failure-every N] [--nvrx DIR] [--quick] [--output FILE.md]

recovery  Each job trains the demo model of the tests in pretrain_gpt_moe.py. Its highest rank is killed in
          the backward of an iteration, --repeats times. benchmarks/recoveries.py has what is
          measured, and checks that each kill was answered as it should be.
ettr      The job of examples/quickstart.sh on 4 ranks, killed every 100 iterations, --failures times.
          ETTR is the time of all iterations, each once and as long as the median one, over the time from
          the beginning of the first to the end of the last.

All jobs of a part and size must end in the same state, bit for bit. Kinds:

restart    torchrun starts all ranks again; those that it ends wait for nobody's report
keep       the same under `moe_ft keep`
sparse     likewise from sparse windows, the last iterations of which run again
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
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import batched
from pathlib import Path
from statistics import median

from benchmarks.inprocess import called_s, find_problem, run_in_process
from benchmarks.jobs import (
    MODELS,
    SCRIPT,
    Changes,
    JobFolder,
    data_folder,
    job_folder,
    run_under_torchrun,
)
from benchmarks.output import conditions, distinct, markdown_table, read_options, show, spread
from benchmarks.recoveries import (
    REPAIR_PHASES,
    RESTART_PHASES,
    Answer,
    Efficiency,
    Expected,
    Log,
    Moments,
    check_answers,
    digests_of,
    efficiency_of,
    read_moments,
)
from tests.harness import events

RECOVERY, ETTR = "recovery", "ettr"
PARTS = [RECOVERY, ETTR]
TARGET_SHARE, TARGETS_S = 0.1, {4: 0.35, 8: 2.0}
ETTR_RANKS = 4

Row = tuple[str, ...]
Size = tuple[str, int]  # part and ranks


# --- jobs whose highest rank is killed again and again, one for each kind of answer

WINDOW = 3
NUM_RESERVES = 3  # as many as a user would hold; each makes the wrapper slower
DENSE = ("--moe-ft-strategy", "dense")
REPAIR = ("--moe-ft-repair", "auto")
_SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", str(WINDOW))
_WHOLE = (
    *(*_SPARSE, "--moe-ft-upstream-log"),
    *("--moe-ft-breakpoints", "--moe-ft-recovery", "local"),
)
_REFUSAL = re.compile(rf"^{re.escape(SCRIPT)}: error: (.*)", re.M)


class NotRunError(Exception):
    """A job that cannot run here, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Kind of answer to a death.

    Attributes:
        title: for tables.
        flags: of moe_ft.
        keeps: whether ranks are forked by `moe_ft keep`.
        is_local: whether the stages of the others run no iterations again.
        interval_s: of a wrapper in the process: how often it looks, and how long it waits for other reports.
        num_reserves: of a wrapper in the process: ranks that wait for a kill each; 0 for a kind without.
    """

    title: str
    answer: Answer
    flags: Sequence[str] = DENSE
    keeps: bool = True
    is_local: bool = False
    interval_s: float = 0.0
    num_reserves: int = 0


KINDS = {
    "restart": Kind(title="restart", answer=Answer.RESTART, keeps=False),
    "keep": Kind(title="restart, keep", answer=Answer.RESTART),
    "sparse": Kind(title="restart, keep, sparse", answer=Answer.RESTART, flags=_SPARSE),
    "repair": Kind(title="repair", answer=Answer.REPAIR, flags=(*DENSE, *REPAIR)),
    "whole": Kind(
        title="repair, whole survivors, sparse",
        answer=Answer.REPAIR,
        flags=(*_WHOLE, *REPAIR),
        is_local=True,
    ),
    "nvrx": Kind(
        title="NVRx in-process",
        answer=Answer.INPROCESS,
        interval_s=1.0,
        num_reserves=NUM_RESERVES,
    ),
    "nvrx-fast": Kind(
        title="NVRx in-process, 0.1 s",
        answer=Answer.INPROCESS,
        interval_s=0.1,
        num_reserves=NUM_RESERVES,
    ),
}
REFERENCE = "restart"  # others are compared with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job.

    Attributes:
        kind: of `KINDS`.
        kills: ``[kill]`` the iteration that runs.
        model: what differs from the demo model of the tests.
    """

    kind: str
    num_ranks: int
    kills: Sequence[int]
    num_iterations: int
    model: Changes = field(default_factory=dict)

    @property
    def expected(self) -> Expected:
        """Return what its recoveries must be."""
        kind = KINDS[self.kind]
        return Expected(
            answer=kind.answer,
            killed=self.num_ranks - 1,
            kills=self.kills,
            is_local=kind.is_local,
        )

    def flags(self, data: Sequence[str], job: JobFolder) -> list[str]:
        """Return the flags of the script."""
        # Imports of many ranks on few cores may be minutes apart.
        model: Changes = {"distributed_timeout_minutes": 3, "train_iters": self.num_iterations}
        own = KINDS[self.kind].flags
        flags = job.words(data, layout_of(self.num_ranks), own, {**self.model, **model})
        for kill in self.kills:
            flags += ["--moe-ft-inject-fault", f"kill:{self.num_ranks - 1}@{kill}:backward"]
        return flags


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Remains of a job.

    Attributes:
        logs: ``[rank]`` all events.
        called_s: ``[kill]`` of a wrapper in the process: when the last rank has called its function again.
    """

    logs: Sequence[Log]
    called_s: Sequence[float] = ()


def layout_of(num_ranks: int) -> Mapping[str, int]:
    """Return a layout with at least two stages, since healthy stages are what a local recovery spares."""
    stages = max(2, num_ranks // 2)
    return {"pp": stages, "ep": num_ranks // stages}


def kills_of(num_kills: int) -> list[int]:
    """Return the iterations of kills: each after a window, and a whole one after the recovery before it."""
    return [WINDOW * (2 * number + 1) + 1 for number in range(num_kills)]


def run_job(job: Job, data: Sequence[str], folder: Path, nvrx: Path) -> Result:
    """Run a job to its end.

    Args:
        job: to run.
        data: flags that name the data set.
        folder: for what it leaves until it has been read.
        nvrx: where nvidia-resiliency-ext is installed.

    Raises:
        NotRunError: if it is refused, or what it needs is not installed.
        AssertionError: if it fails.
    """
    kind, ranks = KINDS[job.kind], range(job.num_ranks)
    with job_folder(folder) as place:
        flags, log_path = job.flags(data, place), place.log / "output"
        if kind.answer is Answer.INPROCESS:
            if problem := find_problem(nvrx):
                raise NotRunError(problem)
            run_in_process(
                flags,
                job.num_ranks,
                num_kills=len(job.kills),
                interval_s=kind.interval_s,
                nvrx=nvrx,
                log_path=log_path,
            )
        else:
            # A repair needs no restarts: one that falls back to them fails.
            restarts = len(job.kills) if kind.answer is Answer.RESTART else 0
            try:
                run_under_torchrun(
                    [SCRIPT, *flags],
                    job.num_ranks,
                    max_restarts=restarts,
                    log_path=log_path,
                    keeps=kind.keeps,
                )
            except AssertionError as error:
                if found := _REFUSAL.search(log_path.read_text(errors="replace")):
                    raise NotRunError(found[1]) from error
                raise
        return Result(
            logs=[events(place.events, rank) for rank in ranks],
            called_s=called_s(place.log, job.num_ranks, len(job.kills))
            if kind.answer is Answer.INPROCESS
            else (),
        )


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
            model=MODELS["quickstart"],
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
    options = read_options(
        words,
        ranks=([2, 4, 8], [2]),
        kinds=(list(KINDS), ["repair"]),
        parts=(PARTS,),
        repeats=(5, 1, "kills of a kind"),
        failures=(2, 1, "of the demo job"),
        failure_every=(100, 10, "iterations of the demo job"),
        nvrx=(Path("runs/nvrx"),),
    )
    if min(options.ranks) < 2 or any(ranks % 2 for ranks in options.ranks):
        sys.exit(f"--ranks must be even numbers from 2, not {options.ranks}: half are stages")
    if options.repeats < 1 or options.failures < 1:
        sys.exit("--repeats and --failures must be 1 or more")
    options.nvrx = options.nvrx.resolve()
    return options


def main() -> None:
    """Run all jobs and print the tables."""
    options = parse()
    parts = [conditions(f"Median (range) of {options.repeats}.")]
    with data_folder() as (folder, data):
        bench = Bench(data=data, folder=folder, nvrx=options.nvrx)
        parts += measure(options, bench)
    if bench.not_run:
        parts.append("\n".join(bench.not_run))
    show(parts, options.output)
    sys.exit(int(bench.has_failed))


if __name__ == "__main__":
    main()
