"""`python -m moe_ft simulate CONFIG.toml`: simulate a long run of a job under failures.

The job is what `plan` makes of the same options. moe_ft/simulate has the simulation, planning/time_shares.py
the words for the uses of time.
"""

import argparse
import math
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from moe_ft.bars import progress_bar
from moe_ft.commands.pages import (
    LEFT,
    ROW,
    WIDTH,
    Comparison,
    PagePart,
    bar,
    check_page,
    key_of_colours,
    label,
    shares_rows,
    svg,
    write_page,
)
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.commands.plan import OPTIONS, compare
from moe_ft.commands.plan_advice import Alternative
from moe_ft.commands.plan_inputs import read_text
from moe_ft.errors import ConfigError
from moe_ft.planning.costs import RecoveryKind
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.time_shares import Spent
from moe_ft.simulate.course import MachinePool, RunCourse
from moe_ft.simulate.failures import Change, Failures, mean_time_between, read_trace
from moe_ft.simulate.repetitions import MOST, Setting, Simulated, simulate
from moe_ft.spelling import hint

FASTEST = "fastest"
_MOST_FAILURES = 100_000  # of a run, which then takes seconds
_SHRINKS = [
    ("speed of n of N nodes", "n / N", "assumption: training does not shrink yet"),
    ("a node that comes back", "a recovery, nothing redone", "assumption: likewise"),
]
_RECOVERIES = (FASTEST, *RecoveryKind)
_HEADERS = (
    *("alternative", "ETTR", "+- (95 %)", "calculated", "recovery", "failures", "all copies lost"),
    *("tokens lost", "runs"),
)
_CURVE_ROWS = 8


_Rule = tuple[
    str, Callable[[Any], bool]
]  # values that a key may have, in words, and what tells them


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TEXT: _Rule = ("a text", lambda value: isinstance(value, str))
_ANY: _Rule = ("a text or a number", lambda value: isinstance(value, str) or _number(value))
_SHARE: _Rule = ("from 0 to 1", lambda value: _number(value) and 0 <= value <= 1)
_ABOVE: _Rule = ("a number above 0", lambda value: _number(value) and 0 < value < math.inf)
_COUNT: _Rule = ("a whole number, 0 to 10^6", lambda value: _integer(value) and 0 <= value <= 10**6)
_ONE_OR_MORE: _Rule = (
    "a whole number, 1 to 10^6",
    lambda value: _integer(value) and 1 <= value <= 10**6,
)
_TABLES: Mapping[str, Mapping[str, _Rule]] = {
    "job": {"flags": _TEXT, **dict.fromkeys(OPTIONS, _ANY)},
    "failures": {
        "trace": _TEXT,
        "weibull_shape": ("from 0.2 to 10", lambda value: _number(value) and 0.2 <= value <= 10),
        "crash_share": _SHARE,
        "rack_nodes": _ONE_OR_MORE,
        "rack_share": _SHARE,
    },
    "machines": {
        "spares": _COUNT,
        "replace_s": (
            "seconds, at least 0",
            lambda value: _number(value) and 0 <= value < math.inf,
        ),
        "return_h": _ABOVE,
        "least_nodes": _ONE_OR_MORE,
    },
    "run": {
        "hours": _ABOVE,
        "recovery": (" or ".join(_RECOVERIES), lambda value: value in _RECOVERIES),
        "seed": _COUNT,
        "tolerance": ("from 0.0001 to 0.5", lambda value: _number(value) and 1e-4 <= value <= 0.5),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStrategy:
    """A strategy with its flags, and what became of it; no result where there is a problem."""

    name: str
    flags: tuple[str, ...]
    is_exact: bool = True
    result: Simulated | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A job under failures with several strategies, the best first."""

    job: PlannedJob
    setting: Setting
    outcomes: Sequence[SimulatedStrategy]
    assumptions: Sequence[tuple[str, str, str]]

    @property
    def even(self) -> list[str]:
        """Names of those whose intervals overlap with that of the best, in which they are as good."""
        if not self.done:
            return []
        (_, best), *others = self.done
        return [
            name
            for name, found in others
            if abs(best.ettr - found.ettr) <= best.half_width + found.half_width
        ]

    @property
    def done(self) -> list[tuple[str, Simulated]]:
        """Names and results of those that can be."""
        return [(each.name, each.result) for each in self.outcomes if each.result is not None]


def add_simulate_command(commands: Commands) -> None:
    """Add the command and its options."""
    parser = add_command(
        commands,
        "simulate",
        "simulate a long run under failures, with every strategy",
        "The file names the job, as `moe_ft plan` takes it, its failures and its spare machines.",
        "run.toml --html run.html",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="see docs/simulate.md")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write it as a page")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulate the run that a file describes, and print how it went."""
    check_page(options.html)
    result = simulate_file(options.config)
    answer = word(result)
    write_page(options.html, answer.as_html())
    answer.print(as_json=options.json)
    return 0


def simulate_file(path: Path) -> Simulation:
    """Simulate the run that a file describes with every strategy that its job may have.

    Raises:
        ConfigError: if the file says what cannot be.
    """
    config = _read(path)
    trace = _read_trace(path, config)
    horizon_s = 3600 * config["run"].get("hours", 12.0)
    if trace is not None and "hours" not in config["run"]:
        horizon_s = trace[-1].time_s or horizon_s
    job = dict(config["job"])
    given = job.pop("flags", "")
    if trace is not None:
        mean_s = mean_time_between(trace, horizon_s)
        if "mtbf_s" not in job and math.isfinite(mean_s):
            job["mtbf_s"] = mean_s
    try:
        flags = shlex.split(given)
    except ValueError as error:  # a quote that stays open
        raise ConfigError(f"{path}: job.flags={given!r}: {error}. Correct it.") from error
    words = [f"--{name.replace('_', '-')}={value}" for name, value in job.items()]
    told = compare([*words, "--", *flags])
    setting = _setting(config, told.job.num_nodes, horizon_s, trace, told.job.measured.mtbf_s)
    outcomes = [
        _simulate(each, config["run"].get("recovery", FASTEST), setting)
        for each in told.advice.alternatives
    ]
    outcomes = ranked(outcomes)
    assumptions = [*told.assumptions, *_SHRINKS] if setting.pool.least_nodes else told.assumptions
    return Simulation(job=told.job, setting=setting, outcomes=outcomes, assumptions=assumptions)


def ranked(outcomes: Sequence[SimulatedStrategy]) -> list[SimulatedStrategy]:
    """Return outcomes, the best first.

    One that loses tokens comes after the best exact one unless their intervals are apart: else noise decides.
    """
    results = [each.result for each in outcomes if each.result is not None and each.is_exact]
    exact = max(results, key=lambda each: each.ettr, default=None)

    def key(each: SimulatedStrategy) -> tuple[float, bool]:
        if (found := each.result) is None:
            return 0.0, False
        if exact is None or each.is_exact:
            return -found.ettr, False
        is_better = found.ettr - found.half_width > exact.ettr + exact.half_width
        return -(found.ettr if is_better else min(found.ettr, exact.ettr)), True

    return sorted(outcomes, key=key)


def _simulate(found: Alternative, recovery: str, setting: Setting) -> SimulatedStrategy:
    """Simulate one alternative, or say why it cannot be."""
    problem = found.problem or (found.refusal and f"refused: {found.refusal}")
    if found.costs is None or problem:
        return SimulatedStrategy(name=found.name, flags=found.flags, problem=problem)
    kind = found.costs.fastest if recovery == FASTEST else RecoveryKind(recovery)
    if kind not in found.costs.recoveries:
        problem = f"recovery={kind} cannot be: its costs are known for {', '.join(found.costs.recoveries)}"
        return SimulatedStrategy(name=found.name, flags=found.flags, problem=problem)
    with progress_bar(found.name, MOST) as bar:

        def note(half_width: float) -> None:
            bar.advance(1, f"ETTR +- {half_width:.4f}")

        result = simulate(found.costs, kind, setting, note)
    return SimulatedStrategy(
        name=found.name, flags=found.flags, is_exact=found.is_exact, result=result
    )


def _setting(
    config: Mapping[str, Mapping[str, Any]],
    num_nodes: int,
    horizon_s: float,
    trace: list[Change] | None,
    mtbf_s: float | None,
) -> Setting:
    machines, given, run = config["machines"], dict(config["failures"]), config["run"]
    assert mtbf_s is not None  # advice needs it
    if horizon_s / mtbf_s > _MOST_FAILURES:
        raise ConfigError(
            f"run.hours={horizon_s / 3600:g} with a failure every {mtbf_s:g} s makes "
            f"{horizon_s / mtbf_s:,.0f} failures, which must be at most {_MOST_FAILURES:,}. "
            "Lower the hours, or raise job.mtbf_s."
        )
    least_nodes = machines.get("least_nodes")
    if least_nodes is not None and least_nodes > num_nodes:
        raise ConfigError(
            f"machines.least_nodes={least_nodes} must be at most the {num_nodes} nodes of the job. Lower it, "
            "or leave it out."
        )
    return_h = machines.get("return_h", math.inf if "spares" in machines else 0.0)
    given.pop("trace", None)
    return Setting(
        failures=Failures(mtbf_s=mtbf_s, **given) if trace is None else trace,
        pool=MachinePool(
            num_nodes=num_nodes,
            num_spares=machines.get("spares", 0),
            replace_s=machines.get("replace_s", 0.0),
            return_s=3600 * return_h,
            are_there=trace is None,
            least_nodes=least_nodes,
        ),
        horizon_s=horizon_s,
        seed=run.get("seed", 0),
        tolerance=run.get("tolerance", 0.01),
    )


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the tables of a file, each of which may be left out but that of the job."""
    try:
        tables = tomllib.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Give a TOML file as docs/simulate.md has it."
        ) from error
    for name, table in tables.items():
        if name not in _TABLES or not isinstance(table, dict):
            raise _unknown(path, name, "table", [*_TABLES])
        for key, value in table.items():
            if key not in _TABLES[name]:
                raise _unknown(
                    path, f"{name}.{key}", "key", [f"{name}.{each}" for each in _TABLES[name]]
                )
            rule, fits = _TABLES[name][key]
            if not fits(value):
                raise ConfigError(
                    f"{path}: {name}.{key}={value!r} must be {rule}. Correct it, or leave it out."
                )
    return {name: tables.get(name, {}) for name in _TABLES}


def _unknown(path: Path, name: str, what: str, known: list[str]) -> ConfigError:
    remedy = hint(name, known, 3, 0.4) or " Correct it."
    return ConfigError(
        f"{path}: {name} is no {what} of a simulation, which has {', '.join(known)}.{remedy}"
    )


def _read_trace(path: Path, config: Mapping[str, Mapping[str, Any]]) -> list[Change] | None:
    """Return the trace that the file names, relative to itself; None if it names none."""
    given = dict(config["failures"])
    name = given.pop("trace", None)
    if name is None:
        if given.get("rack_share") and given.get("rack_nodes", 1) == 1:
            raise ConfigError(
                f"{path}: failures.rack_share={given['rack_share']} needs failures.rack_nodes: the nodes "
                "that fail together. Give it, or leave the share out."
            )
        return None
    machines = sorted({*config["machines"]} & {"spares", "return_h"})
    if given or machines:
        both = ", ".join([*given, *machines])
        raise ConfigError(
            f"{path}: failures.trace={name} does not go with {both}: the trace says who fails and who comes. "
            "Leave one of them out."
        )
    try:
        lines = read_text(path.parent / name).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: failures.trace={name} cannot be read: {error}. Give the path from the file on."
        ) from error
    return read_trace(name, lines, config["run"].get("seed", 0))


def word(simulation: Simulation) -> Comparison:
    """Return a simulation in words."""
    setting, done, outcomes = simulation.setting, simulation.done, simulation.outcomes
    pool, failures = setting.pool, setting.failures
    comes, drawn = "as the trace has them", None
    if isinstance(failures, Failures):
        comes, drawn = f"every {failures.mtbf_s:,.6g} s on average", asdict(failures)
    problems = [f"{each.name}: {each.problem}" for each in outcomes if each.problem]
    problems += [
        f"{name}: the interval is wider than {setting.tolerance:.2%} of ETTR after "
        f"{found.num_repetitions:,} runs"
        for name, found in done
        if not found.is_converged
    ]
    even = ""
    if simulation.even:
        even = f"no difference beyond noise from {done[0][0]}: {', '.join(simulation.even)}"
    horizon_s, courses = setting.horizon_s, [(name, found.first) for name, found in done]
    shares = {name: found.shares for name, found in done}
    timeline = [("", key_of_colours([*Spent])), ("", _draw_timeline(courses, horizon_s))]
    return Comparison(
        command="simulate",
        job=simulation.job,
        headline=f"{simulation.job.num_ranks:,} ranks on {pool.num_nodes:,} nodes, {pool.num_spares:,} "
        f"spare; {horizon_s / 3600:.4g} hours, failures {comes}; seed {setting.seed}",
        parts=[
            PagePart(title="Strategies", table=(_HEADERS, [_cells(each) for each in outcomes])),
            PagePart(lines=problems),
            PagePart(
                title="Where the time goes",
                table=(("time", *shares), shares_rows(shares)) if shares else None,
            ),
            PagePart(lines=[even] if even else []),
            PagePart(title="Timeline of the first run", drawings=timeline),
            PagePart(
                title="Goodput of the first run: the share of the time so far that was productive",
                drawings=[(name, _draw_curve(course, horizon_s)) for name, course in courses],
            ),
        ],
        assumptions=simulation.assumptions,
        values={
            "nodes": pool.num_nodes,
            "spares": pool.num_spares,
            "hours": horizon_s / 3600,
            "seed": setting.seed,
            "failures": drawn or "trace",
            "even": simulation.even,
            "alternatives": [_as_object(each) for each in outcomes],
        },
    )


def _cells(each: SimulatedStrategy) -> tuple[str, ...]:
    found = each.result
    if found is None:
        return (each.name, "cannot be", *[""] * (len(_HEADERS) - 2))
    return (
        each.name,
        f"{found.ettr:.2%}",
        f"{found.half_width:.2%}",
        "-" if found.calculated is None else f"{found.calculated.productive:.2%}",
        f"{found.kind}",
        f"{found.num_failures:.4g}",
        f"{found.num_fallbacks:.3g}",
        f"{found.lost_iterations:.1f} iterations" if found.lost_iterations else "none",
        f"{found.num_repetitions:,}",
    )


def _as_object(each: SimulatedStrategy) -> dict[str, Any]:
    value: dict[str, Any] = {"name": each.name, "flags": each.flags, "problem": each.problem}
    if (found := each.result) is not None:
        value |= {
            "ettr": found.ettr,
            "half_width": found.half_width if math.isfinite(found.half_width) else None,
            "converged": found.is_converged,
            "repetitions": found.num_repetitions,
            "time": asdict(found.shares),
            "badput": found.shares.badput,
            "calculated": None if found.calculated is None else asdict(found.calculated),
            "recovery": found.kind,
            "failures": found.num_failures,
            "all_copies_lost": found.num_fallbacks,
            "lost_iterations": found.lost_iterations,
            "costs": asdict(found.costs),
            "timeline": [
                {"start_s": start_s, "end_s": end_s, "use": use}
                for start_s, end_s, use in found.first.spans
            ],
        }
    return value


def _draw_timeline(courses: Sequence[tuple[str, RunCourse]], horizon_s: float) -> Markup:
    """Return a row of spans for each course."""
    scale, parts = (WIDTH - LEFT) / horizon_s, []
    for row, (name, course) in enumerate(courses):
        parts.append(label(0, row, name))
        for start_s, end_s, use in course.spans:
            parts.append(bar(LEFT + scale * start_s, scale * (end_s - start_s), row, use))
    return svg(len(courses), "".join(parts))


def _draw_curve(course: RunCourse, horizon_s: float) -> Markup:
    """Return the share of the time so far that was productive: goodput, from 0 to 1."""
    running_s = sum(end - start for start, end, use in course.spans if use is Spent.PRODUCTIVE)
    useful = course.seconds[Spent.PRODUCTIVE] / running_s if running_s else 0.0
    scale, height = (WIDTH - LEFT) / horizon_s, ROW * _CURVE_ROWS
    done_s, points = 0.0, []
    for start_s, end_s, use in course.spans:
        for time_s in (start_s, end_s):
            if time_s == end_s and use is Spent.PRODUCTIVE:
                done_s += useful * (end_s - start_s)
            goodput = done_s / time_s if time_s else useful
            points.append(f"{LEFT + scale * time_s:.1f},{height * (1 - goodput):.1f}")
    line = f'<polyline class="curve" points="{" ".join(points)}"/>'
    last = f"{course.shares.productive:.2%} in the end"
    return svg(_CURVE_ROWS, label(0, 0, "100 %") + label(0, _CURVE_ROWS - 1, last) + line)
