"""Result of `python -m moe_ft simulate` in words: as text, as JSON, and as a page with a timeline.

presets/simulate.html has the page, planning/time_shares.py the words for the uses of time.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup

from moe_ft.commands.pages import (
    LEFT,
    ROW,
    WIDTH,
    Answer,
    bar,
    html_table,
    key_of_colours,
    label,
    svg,
)
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.time_shares import Spent
from moe_ft.simulate.course import Course
from moe_ft.simulate.failures import Failures
from moe_ft.simulate.repetitions import Setting, Simulated

_HEADERS = (
    *("alternative", "ETTR", "+- (95 %)", "calculated", "recovery", "failures", "all copies lost"),
    *("tokens lost", "runs"),
)
_CURVE_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
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
    outcomes: Sequence[Outcome]
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


def word(simulation: Simulation) -> Answer:
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
    num_ranks = simulation.job.num_ranks
    even = ""
    if simulation.even:
        even = f"no difference beyond noise from {done[0][0]}: {', '.join(simulation.even)}"
    courses = [(name, found.first) for name, found in done]
    shares = {name: found.shares for name, found in done}
    return Answer(
        job=simulation.job,
        headline=f"{num_ranks:,} ranks on {pool.num_nodes:,} nodes, {pool.num_spares:,} spare; "
        f"{setting.horizon_s / 3600:.4g} hours, failures {comes}; seed {setting.seed}",
        headers=_HEADERS,
        rows=[_cells(each) for each in outcomes],
        problems=problems,
        shares=shares,
        assumptions=simulation.assumptions,
        page="simulate.html",
        last=even,
        values={
            "nodes": pool.num_nodes,
            "spares": pool.num_spares,
            "hours": setting.horizon_s / 3600,
            "seed": setting.seed,
            "failures": drawn or "trace",
            "even": simulation.even,
            "alternatives": [_as_object(each) for each in outcomes],
        },
        parts={
            "even": even,
            "shares": html_table(
                ("time", *shares),
                [(use, *(f"{each[use]:.2%}" for each in shares.values())) for use in Spent],
            ),
            "keys": key_of_colours([*Spent]),
            "timeline": _draw_timeline(courses, setting.horizon_s),
            "curves": [(name, _draw_curve(course, setting.horizon_s)) for name, course in courses],
        },
    )


def _cells(each: Outcome) -> tuple[str, ...]:
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


def _as_object(each: Outcome) -> dict[str, Any]:
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


def _draw_timeline(courses: Sequence[tuple[str, Course]], horizon_s: float) -> Markup:
    """Return a row of spans for each course."""
    scale, parts = (WIDTH - LEFT) / horizon_s, []
    for row, (name, course) in enumerate(courses):
        parts.append(label(0, row, name))
        for start_s, end_s, use in course.spans:
            parts.append(bar(LEFT + scale * start_s, scale * (end_s - start_s), row, use))
    return svg(len(courses), "".join(parts))


def _draw_curve(course: Course, horizon_s: float) -> Markup:
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
