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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import StatisticsError
from typing import Any

from benchmarks.conditions import conditions
from benchmarks.lost_nodes import (
    BASELINE,
    LEAST_DISTANCE,
    NUM_NODES,
    PRESETS,
    Row,
    draw_failures,
    rows,
    run_row,
)
from benchmarks.measured_profile import Profile
from benchmarks.output import ROOT, markdown_table, parse_options, show
from benchmarks.quickstart import MODEL
from benchmarks.sparse_jobs import write_data
from moe_ft.planning.costs import RecoveryKind
from moe_ft.planning.time_shares import Spent, TimeShares, calculate_shares
from moe_ft.simulate.course import Pool, run_course
from moe_ft.simulate.failures import Change, Failures
from moe_ft.simulate.repetitions import Setting, simulate

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
    with tempfile.TemporaryDirectory(prefix="simulator_vs_measured_") as name:
        data = write_data(Path(name))
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
                found = run_row(row, failures, data, Path(name))
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
    pool = Pool(num_nodes=NUM_NODES, return_s=0.0)
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=10, help="of each row")
    parser.add_argument("--every", type=int, default=24, help="iterations between them on average")
    parser.add_argument("--rows", nargs="+", choices=names, default=[], help="all by default")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for rows that begin")
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "runs" / "simulator_vs_measured.json",
        metavar="FILE.json",
        help="rows that have run, which do not run again",
    )
    quick = Path(tempfile.gettempdir()) / f"simulator_vs_measured_{os.getpid()}.json"
    options = parse_options(
        parser, words, failures=2, every=LEAST_DISTANCE + 2, rows=["gemini-keep"], results=quick
    )
    if options.failures < 1 or options.every <= LEAST_DISTANCE:
        parser.error(f"--failures must be 1 or more, --every more than {LEAST_DISTANCE}")
    return options


def main() -> None:
    """Run the rows that are missing, and print the tables of all that are there."""
    options = parse()
    parts = [conditions(f"{options.failures} failures a row, every {options.every} iterations.")]
    results = Results(
        options.results, {"failures": options.failures, "every": options.every, "model": MODEL}
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
    tokens = int(MODEL["seq_length"]) * 16 * 2  # of a batch, with top-k
    show([*parts, *tables(found, tokens), *(["\n".join(lines)] if lines else [])], options.output)
    sys.exit(int(any("FAILED" in line for line in lines)))


if __name__ == "__main__":
    main()
