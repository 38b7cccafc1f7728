"""Useful time (ETTR) of jobs that lose nodes, measured and simulated, for four presets and each recovery.

    python -m benchmarks.simulator_vs_measured [--failures N] [--every N] [--rows NAME ...] [--minutes N]
        [--results FILE.json] [--quick] [--output FILE.md]

The model of examples/quickstart.sh trains on two nodes of two ranks, each node under its own torchrun. A node
is lost again and again: its processes die, and its memory is gone. The distances between failures are drawn
once for all rows. They are exponential, after the first iterations of each start, so that every failure is
answered before the next. So a row is a job with one preset of examples/presets and one recovery:

restart    torchrun starts all ranks again
keep       the same under `moe_ft keep`
repair     --moe-ft-repair auto: the others keep their processes
local      the same with whole survivors: one stage alone computes again

The profile of a row is read from its event logs (benchmarks/measured_profile.py): time of an iteration, its
excess over a job without fault tolerance, interval, window and lag of states, recoveries by phase. The
simulation gets this profile and the instants of the failures, and must find how far the job came. Exact rows
must end in the state of the job without failures, bit for bit. MoC-System's loses tokens, which is no time.

Each row is written to --results when it ends, and not run again; with --minutes only rows begin that should
end in time. --output makes a page of all rows that are there.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import StatisticsError
from typing import Any

from benchmarks.jobs import MODELS, SCRIPT, data_folder, job_folder
from benchmarks.measured_profile import WARM_ITERATIONS, Profile, iteration_s_of, read_profile
from benchmarks.output import ROOT, conditions, markdown_table, read_options, show
from benchmarks.recoveries import Answer, Expected, check_answers, digests_of
from moe_ft.planning.costs import RecoveryKind
from moe_ft.planning.time_shares import Spent, TimeShares, calculate_shares
from moe_ft.simulate.course import MachinePool, run_course
from moe_ft.simulate.failures import Change, Failures
from moe_ft.simulate.repetitions import Setting, simulate
from tests.harness import events
from tests.nodes import Nodes

NUM_RANKS, NUM_NODES = 4, 2
LAYOUT = {"pp": 2, "ep": 2}  # a node is a stage
BASELINE = "none"
LEAST_DISTANCE = (
    8  # iterations from a failure to the next: a recovery, and a state that is complete again
)
# Iterations between states on storage. `auto` profiles the first iterations of each start, which are most of
# those between two failures here, and next to none where failures are hours apart.
INTERVAL = 4
TAIL = 8  # iterations after the last failure
_DEADLINE_S = 900.0
_REPAIR = ("--moe-ft-repair", "auto")
_LOCAL = (*_REPAIR, "--moe-ft-upstream-log", "--moe-ft-breakpoints", "--moe-ft-recovery", "local")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A preset of examples/presets.

    Attributes:
        settings: environment variables of its script.
        flags: after those that it prints.
        replicas: nodes that keep a copy; 0 if states are on storage.
        recoveries: those that it can have.
    """

    title: str
    settings: Mapping[str, str]
    replicas: int
    is_exact: bool
    flags: Sequence[str] = ()
    recoveries: Sequence[str] = ("keep", "repair", "restart")


PRESETS = {
    "moevement": Preset(
        title="MoEvement",
        settings={"WINDOW": "3"},
        replicas=1,
        is_exact=True,
        recoveries=("local", "keep", "repair", "restart"),
    ),
    "gemini": Preset(title="Gemini", settings={}, replicas=1, is_exact=True),
    "checkfreq": Preset(
        title="CheckFreq",
        settings={},
        replicas=0,
        is_exact=True,
        flags=("--moe-ft-interval", f"{INTERVAL}"),
    ),
    "moc": Preset(
        title="MoC-System", settings={"INTERVAL": f"{INTERVAL}"}, replicas=0, is_exact=False
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A job: a preset with a recovery, or without both."""

    preset: str
    recovery: str

    @property
    def name(self) -> str:
        """Its name in the results."""
        return self.preset if self.preset == BASELINE else f"{self.preset}-{self.recovery}"

    def flags(self, persist_dir: Path) -> list[str]:
        """Return the flags of moe_ft."""
        if self.preset == BASELINE:
            return []
        settings = dict(PRESETS[self.preset].settings)
        if not PRESETS[self.preset].replicas:
            settings["PERSIST_DIR"] = str(persist_dir)
        printed = subprocess.run(
            [ROOT / "examples" / "presets" / f"{self.preset}.sh"],
            env={"PATH": os.environ["PATH"], **settings},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        more = {"repair": _REPAIR, "local": _LOCAL}.get(self.recovery, ())
        return [*printed, *PRESETS[self.preset].flags, *more]


def rows(names: Sequence[str]) -> list[Row]:
    """Return the rows to run, that without fault tolerance first."""
    found = [Row(preset=BASELINE, recovery="")]
    order = ("keep", "repair", "local", "restart")  # the slowest last
    found += [
        Row(preset=preset, recovery=recovery)
        for recovery in order
        for preset, each in PRESETS.items()
        if recovery in each.recoveries
    ]
    return [each for each in found if not names or each.name in (*names, BASELINE)]


def draw_failures(num_failures: int, every: int) -> list[tuple[int, int]]:
    """Return iterations that are interrupted, and a rank of the node that is lost in each."""
    drawn = random.Random(40)  # noqa: S311 - no secret
    iteration, found = WARM_ITERATIONS, []
    for _ in range(num_failures):
        rest = drawn.expovariate(1 / (every - LEAST_DISTANCE))
        iteration += LEAST_DISTANCE + math.ceil(rest)
        found.append((iteration, drawn.randrange(NUM_RANKS)))
    return found


def run_row(
    row: Row, failures: Sequence[tuple[int, int]], data: Sequence[str], folder: Path
) -> Any:
    """Run a job, check it, and return what is kept of it.

    Raises:
        AssertionError: if it fails, or a failure was answered otherwise than it should be.
    """
    with job_folder(folder) as job:
        length = {"train_iters": failures[-1][0] + TAIL, "distributed_timeout_minutes": 3}
        flags = row.flags(job.log / "persisted")
        words = job.words(data, LAYOUT, flags, {**MODELS["quickstart"], **length})
        if row.preset == BASELINE:
            words = [word for word in words if word not in job.memory_flags]
        else:
            for iteration, rank in failures:
                words += ["--moe-ft-inject-fault", f"lose-node:{rank}@{iteration}:backward"]
        is_kept = row.recovery not in ("", "restart")
        answers_alone = row.recovery in (
            "repair",
            "local",
        )  # one that falls back to a restart fails
        with Nodes(
            job.log,
            [SCRIPT, *words],
            num_nodes=NUM_NODES,
            num_ranks=NUM_RANKS,
            max_restarts=0 if answers_alone else len(failures) + 2,
            keeps=is_kept,
            env={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        ) as nodes:
            nodes.start("node0", "node1")
            codes = nodes.wait(_DEADLINE_S)
            said = "\n".join(nodes.log(name)[-3000:] for name in ("node0", "node1"))
        assert codes == [0] * NUM_NODES, f"{row.name} ended with {codes}\n{said}"
        logs = [events(job.events, rank) for rank in range(NUM_RANKS)]
    if row.preset == BASELINE:
        return {"iteration_s": iteration_s_of(logs), "digests": digests_of(logs)}
    check_answers(logs, expected_of(row, failures))
    return {"profile": read_profile(logs).as_object(), "digests": digests_of(logs)}


def expected_of(row: Row, failures: Sequence[tuple[int, int]]) -> Expected:
    """Return what the recoveries of a row must be: answered as it says, from where the preset keeps state."""
    is_repair, preset = row.recovery in ("repair", "local"), PRESETS[row.preset]
    return Expected(
        answer=Answer.REPAIR if is_repair else Answer.RESTART,
        kills=[iteration for iteration, _ in failures],
        is_local=row.recovery == "local",
        tier="peer" if preset.replicas else "storage",
        is_exact=preset.is_exact,
    )


# --- results

TARGET = 0.02
PAPER_ITERATIONS = 600  # MTBF of MoEvement's headline
_HOURS = 12.0
_SECONDS = {"restart": 360.0, "keep": 150.0, "repair": 130.0, "local": 130.0, BASELINE: 100.0}


class Results:
    """Rows that have run, in a file."""

    def __init__(self, path: Path, setting: Mapping[str, Any]) -> None:
        """Read the file; rows of another setting are forgotten."""
        self._path, self._setting = path, dict(setting)
        self.rows: dict[str, Any] = {}
        if path.exists():
            known = json.loads(path.read_text())
            self.rows = known["rows"] if known["setting"] == self._setting else {}

    def add(self, name: str, found: Any, **more: float) -> None:
        """Keep a row."""
        self.rows[name] = {**json.loads(json.dumps(found)), **more}
        value = {"setting": self._setting, "rows": self.rows}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(value, indent=1))

    def expected_s(self, row: Row) -> float:
        """Return the seconds that a row should take: as one with the same recovery has taken."""
        known = [
            found["seconds"]
            for name, found in self.rows.items()
            if name.endswith(f"-{row.recovery}")
        ]
        return max(known, default=_SECONDS[row.recovery or BASELINE])


def run_rows(options: argparse.Namespace, results: Results) -> list[str]:
    """Run the rows that are missing and fit, and return lines on those that have failed."""
    begun_s, lines = time.monotonic(), []
    failures = draw_failures(options.failures, options.every)
    with data_folder() as (folder, data):
        for row in rows(options.rows):
            if row.name in results.rows:
                continue
            left_s = 60 * options.minutes - (time.monotonic() - begun_s)
            if results.expected_s(row) > left_s:
                lines.append(f"- {row.name}: not run, there was no time for it")
                continue
            print(f"{row.name}, {left_s / 60:.0f} minutes left", file=sys.stderr, flush=True)
            start_s, load = time.monotonic(), os.getloadavg()[0]
            try:
                found = run_row(row, failures, data, folder)
                check_digests(row, found, results.rows)
            except (AssertionError, StatisticsError, subprocess.TimeoutExpired) as error:
                print(error, file=sys.stderr, flush=True)
                lines.append(f"- {row.name}: FAILED: {(str(error).splitlines() or ['?'])[0]}")
                continue
            results.add(row.name, found, seconds=time.monotonic() - start_s, load=load)
    return lines


def check_digests(row: Row, found: Any, known: Mapping[str, Any]) -> None:
    """Check that an exact row has ended in the state of the job without failures.

    Raises:
        AssertionError: if it has not.
    """
    if row.preset != BASELINE and PRESETS[row.preset].is_exact and BASELINE in known:
        given = json.loads(json.dumps(found["digests"]))
        assert given == known[BASELINE]["digests"], f"{row.name} ends in another state"


# --- comparing


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A row, measured and simulated.

    Attributes:
        simulated: with the failures of the job.
        calculated: from means, as `plan` does.
        at_papers: simulated with an MTBF of `PAPER_ITERATIONS`.
        load: of the machine when the row began.
        num_redone: simulated iterations that run again after a failure.
    """

    row: Row
    profile: Profile
    measured: TimeShares
    simulated: TimeShares
    calculated: TimeShares
    at_papers: float
    num_redone: float
    load: float

    @property
    def difference(self) -> float:
        """Simulated ETTR less the measured one."""
        return self.simulated.productive - self.measured.productive


def compare(row: Row, profile: Profile, iteration_s: float, load: float = 0.0) -> Compared:
    """Simulate a row with its own profile.

    Raises:
        AssertionError: if the simulation has met other failures.
    """
    kind, replicas = RecoveryKind(row.recovery), PRESETS[row.preset].replicas
    costs = profile.costs(row.preset, kind, iteration_s, replicas)
    pool = MachinePool(num_nodes=NUM_NODES, return_s=0.0)
    trace = [
        Change(time_s=time_s, struck=(number % NUM_NODES,))
        for number, time_s in enumerate(profile.instants)
    ]
    course = run_course(costs, kind, pool, trace, profile.wall_s)
    num_failures = len(profile.failures)
    assert course.num_failures == course.num_recoveries == num_failures, course
    papers = Setting(
        failures=Failures(mtbf_s=PAPER_ITERATIONS * costs.iteration_s),
        pool=pool,
        horizon_s=_HOURS * 3600,
        tolerance=0.002,
    )
    trained_s = profile.num_iterations * profile.step_s
    num_redone = course.seconds[Spent.REDONE] / num_failures / profile.step_s
    return Compared(
        row=row,
        profile=profile,
        measured=profile.shares(iteration_s),
        simulated=course.shares,
        calculated=calculate_shares(costs, kind, trained_s / num_failures),
        at_papers=simulate(costs, kind, papers).ettr,
        num_redone=num_redone,
        load=load,
    )


HEADERS = (
    *("preset", "recovery", "failures", "measured", "simulated", "difference", "within 2 %"),
    *("calculated", f"MTBF of {PAPER_ITERATIONS} iterations", "load at the start"),
)
SHARE_HEADERS = (*("preset", "recovery", "", *Spent),)
PROFILE_HEADERS = (
    *("preset", "recovery", "iteration, s", "of it blocked, s", "interval", "window", "lag"),
    *("processes, s", "state, s", "replay, s", "again", "simulated", "tokens lost, iterations"),
)


def tables(found: Sequence[Compared], tokens: int) -> list[str]:
    """Return the tables of a page."""
    return [
        "Useful time (ETTR)",
        markdown_table([_row(each) for each in found], HEADERS),
        "Where the time went",
        markdown_table([row for each in found for row in _share_rows(each)], SHARE_HEADERS),
        "Profiles: means of a row",
        markdown_table([_profile_row(each, tokens) for each in found], PROFILE_HEADERS),
    ]


def _title(each: Compared) -> tuple[str, str]:
    return PRESETS[each.row.preset].title, each.row.recovery


def _row(each: Compared) -> Sequence[str]:
    return (
        *_title(each),
        f"{len(each.profile.failures)}",
        f"{each.measured.productive:.2%}",
        f"{each.simulated.productive:.2%}",
        f"{each.difference:+.2%}",
        "yes" if abs(each.difference) <= TARGET else "NO",
        f"{each.calculated.productive:.2%}",
        f"{each.at_papers:.2%}",
        f"{each.load:.1f}",
    )


def _share_rows(each: Compared) -> Iterator[Sequence[str]]:
    for name, shares in (("measured", each.measured), ("simulated", each.simulated)):
        yield (*_title(each), name, *(f"{shares[use]:.2%}" for use in Spent))


def _profile_row(each: Compared, tokens: int) -> Sequence[str]:
    profile, wall_s = each.profile, each.profile.wall_s
    blocked = each.measured.blocked / (each.measured.productive + each.measured.blocked)
    redone_s = each.measured.redone * wall_s / len(profile.failures)
    return (
        *_title(each),
        f"{profile.step_s:.3f}",
        f"{blocked * profile.step_s:.3f}",
        f"{profile.interval:.2f}",
        f"{profile.window}",
        f"{profile.lag:.2f}",
        *(f"{profile.mean(name):.2f}" for name in ("processes_s", "state_s", "replay_s")),
        f"{redone_s / profile.step_s:.2f}",
        f"{each.num_redone:.2f}",
        f"{profile.mean('lost_tokens') / tokens:.2f}",
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; --quick has changed some."""
    names = [each.name for each in rows(())][1:]
    quick = Path(tempfile.gettempdir()) / f"simulator_vs_measured_{os.getpid()}.json"
    options = read_options(
        words,
        failures=(10, 2, "of each row"),
        every=(24, LEAST_DISTANCE + 2, "iterations between them on average"),
        rows=(names, ["gemini-keep"]),
        minutes=(math.inf, math.inf, "for rows that begin"),
        results=(
            ROOT / "runs" / "simulator_vs_measured.json",
            quick,
            "rows that have run, which do not run again",
        ),
    )
    if options.failures < 1 or options.every <= LEAST_DISTANCE:
        sys.exit(f"--failures must be 1 or more, --every more than {LEAST_DISTANCE}")
    return options


def main() -> None:
    """Run the rows that are missing, and print the tables of all that are there."""
    options = parse()
    parts = [conditions(f"{options.failures} failures a row, every {options.every} iterations.")]
    results = Results(
        options.results,
        {"failures": options.failures, "every": options.every, "model": MODELS["quickstart"]},
    )
    lines = run_rows(options, results)
    known = results.rows
    found = [
        compare(
            each,
            Profile.of(known[each.name]["profile"]),
            known[BASELINE]["iteration_s"],
            known[each.name]["load"],
        )
        for each in rows(())[1:]
        if each.name in known and BASELINE in known
    ]
    tokens = int(MODELS["quickstart"]["seq_length"]) * 16 * 2  # of a batch, with top-k
    show([*parts, *tables(found, tokens), *(["\n".join(lines)] if lines else [])], options.output)
    sys.exit(int(any("FAILED" in line for line in lines)))


if __name__ == "__main__":
    main()
