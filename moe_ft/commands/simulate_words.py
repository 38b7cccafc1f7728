"""Result of `python -m moe_ft simulate` in words: as text, as JSON, and as a page with a timeline.

presets/simulate.html has the page, planning/time_shares.py the words for the uses of time.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_ft.commands.pages import (
    LEFT,
    ROW,
    WIDTH,
    bar,
    fill_page,
    html_table,
    key_of_colours,
    label,
    shares_table,
    svg,
)
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import describe_layout, describe_model, table
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
    def done(self) -> list[tuple[str, Simulated]]:
        """Names and results of those that can be."""
        return [(each.name, each.result) for each in self.outcomes if each.result is not None]

    @property
    def headline(self) -> str:
        """The setting in a sentence."""
        pool, failures = self.setting.pool, self.setting.failures
        comes = "as the trace has them"
        if isinstance(failures, Failures):
            comes = f"every {failures.mtbf_s:,.6g} s on average"
        return (
            f"{self.job.num_ranks:,} ranks on {pool.num_nodes:,} nodes, {pool.num_spares:,} spare; "
            f"{self.setting.horizon_s / 3600:.4g} hours, failures {comes}; seed {self.setting.seed}"
        )

    @property
    def problems(self) -> list[str]:
        """Lines on what cannot be, and on intervals that are wider than wanted."""
        lines = [f"{each.name}: {each.problem}" for each in self.outcomes if each.problem]
        return lines + [
            f"{name}: the interval is wider than {self.setting.tolerance:.2%} of ETTR after "
            f"{found.num_repetitions:,} runs"
            for name, found in self.done
            if not found.is_converged
        ]


def as_text(result: Simulation) -> str:
    """Return the result as people read it in a terminal."""
    parts = [f"{describe_model(result.job.model)}\n{describe_layout(result.job)}", result.headline]
    parts.append(table([_cells(each) for each in result.outcomes], _HEADERS))
    parts.append("\n".join(result.problems))
    if result.done:
        parts.append(shares_table({name: found.shares for name, found in result.done}))
    parts.append(table(result.assumptions, ("assumption", "value", "from")))
    return "\n\n".join(filter(None, parts))


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


def as_json(result: Simulation) -> str:
    """Return the result for programs. Times are in seconds, sizes in bytes."""
    failures, pool = result.setting.failures, result.setting.pool
    value = {
        "nodes": pool.num_nodes,
        "spares": pool.num_spares,
        "hours": result.setting.horizon_s / 3600,
        "seed": result.setting.seed,
        "failures": asdict(failures) if isinstance(failures, Failures) else "trace",
        "alternatives": [_as_object(each) for each in result.outcomes],
        "assumptions": [
            dict(zip(("name", "value", "from"), each, strict=True)) for each in result.assumptions
        ],
    }
    return json.dumps(value, indent=1)


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


def as_html(result: Simulation) -> str:
    """Return the result as one page without scripts and without anything from elsewhere."""
    horizon_s = result.setting.horizon_s
    courses = [(name, found.first) for name, found in result.done]
    return fill_page(
        "simulate.html",
        model=html.escape(describe_model(result.job.model)),
        layout=html.escape(describe_layout(result.job)),
        headline=html.escape(result.headline),
        alternatives=html_table(_HEADERS, [_cells(each) for each in result.outcomes]),
        problems="".join(f"<p>{html.escape(line)}</p>" for line in result.problems),
        shares=html_table(
            ("time", *(name for name, _ in result.done)),
            [(use, *(f"{found.shares[use]:.2%}" for _, found in result.done)) for use in Spent],
        ),
        keys=key_of_colours([*Spent]),
        timeline=_draw_timeline(courses, horizon_s),
        curves="".join(
            f"<h3>{html.escape(name)}</h3>{_draw_curve(course, horizon_s)}"
            for name, course in courses
        ),
        assumptions=html_table(("assumption", "value", "from"), result.assumptions),
    )


def _draw_timeline(courses: Sequence[tuple[str, Course]], horizon_s: float) -> str:
    """Return a row of spans for each course."""
    scale, parts = (WIDTH - LEFT) / horizon_s, []
    for row, (name, course) in enumerate(courses):
        parts.append(label(0, row, name))
        for start_s, end_s, use in course.spans:
            parts.append(bar(LEFT + scale * start_s, scale * (end_s - start_s), row, use))
    return svg(len(courses), "".join(parts))


def _draw_curve(course: Course, horizon_s: float) -> str:
    """Return the share of the time so far that was productive: goodput, from 0 to 1."""
    running_s = course.seconds[Spent.PRODUCTIVE] + course.seconds[Spent.BLOCKED]
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
