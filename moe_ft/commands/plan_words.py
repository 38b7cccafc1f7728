"""Advice of `python -m moe_ft plan` in words: as text, as JSON, and as a page of HTML.

plan_advice.py has the numbers, presets/plan.html the page.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_ft.commands.pages import (
    LEFT,
    WIDTH,
    bar,
    fill_page,
    html_table,
    key_of_colours,
    label,
    shares_table,
    svg,
)
from moe_ft.commands.plan_advice import Advice, Alternative, Sensitivity
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import describe_layout, describe_model, table
from moe_ft.planning.time_shares import Spent, TimeShares

_HEADERS = (
    *("alternative", "ETTR", "every", "stall", "recovery", "again", "tokens lost"),
    *("host memory of a node", "to storage", "on storage"),
)
# The remedy of each share of the time that is not training.
_LIMITS = {
    Spent.BLOCKED: "training waits for checkpoints: a longer interval or window, or more bandwidth to the "
    "host",
    Spent.RECOVERING: "recoveries take long before iterations run again: faster starts, or "
    "--moe-ft-repair auto under `python -m moe_ft keep`",
    Spent.REDONE: "iterations run again after failures: a shorter interval or window, or more bandwidth to "
    "peers and storage",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """All that is told of a job.

    Attributes:
        assumptions: by name, values and where they come from.
        notes: on what is not counted.
    """

    job: PlannedJob
    advice: Advice
    assumptions: Sequence[tuple[str, str, str]]
    notes: Sequence[str]

    @property
    def headline(self) -> str:
        """The recommendation in a sentence."""
        best = self.advice.best
        if best is None:
            return "nothing fits: the table says what each alternative needs"
        lossy = "" if best.is_exact else "; recoveries lose tokens"
        return f"recommended: {best.name}, {best.ettr:.2%} of the time is training (ETTR){lossy}"

    @property
    def limit(self) -> str:
        """The largest share of the time that the recommendation loses, and its remedy."""
        best = self.advice.best
        if best is None:
            return "fewer replicas, other formats (--moe-ft-state-dtype) or more nodes need less of a node"
        lost = {name: best.shares[name] for name in _LIMITS}
        most = max(lost, key=lambda name: lost[name])
        return f"{lost[most]:.2%} of the time: {_LIMITS[most]}"


def as_text(told: Told) -> str:
    """Return the advice as people read it in a terminal."""
    best, job = told.advice.best, told.job
    parts = [f"{describe_model(job.model)}\n{describe_layout(job)}", told.headline]
    if best is not None:
        parts.append("\n".join(f"    {flag}" for flag in best.flags))
    parts.append(table([_cells(each) for each in told.advice.alternatives], _HEADERS))
    problems = [f"{each.name}: {each.problem}" for each in told.advice.alternatives if each.problem]
    parts.append("\n".join(problems))
    if best is not None:
        parts.append(shares_table({best.name: best.shares}))
    parts.append(f"what limits it: {told.limit}")
    if best is not None:
        parts.append(
            table(_tornado(told.advice, best.ettr), ("input", "value", "x 0.5", "x 2", "swing"))
        )
    parts.append(table(told.assumptions, ("assumption", "value", "from")))
    parts.append("\n".join(f"note: {line}" for line in told.notes))
    return "\n\n".join(filter(None, parts))


def _cells(found: Alternative) -> tuple[str, ...]:
    costs = found.costs
    if costs is None:
        return (found.name, "cannot be", *[""] * (len(_HEADERS) - 2))
    kind = costs.fastest
    return (
        found.name,
        "does not fit" if found.problem else f"{found.ettr:.2%}",
        f"{costs.interval:g} iterations",
        f"{costs.blocked_s:.3f} s",
        f"{costs.recoveries[kind].ready_s:.1f} s ({kind})",
        f"{costs.recoveries[kind].replay_s + costs.redo_s(kind):.1f} s",
        f"{costs.lost_iterations:.1f} iterations" if costs.lost_iterations else "none",
        f"{found.node_bytes / 2**30:,.0f} GiB",
        f"{costs.storage_bytes / costs.iteration_s / 1e6:,.1f} MB/s a rank",
        f"{found.stored_bytes / 1e9:,.0f} GB",
    )


def _tornado(advice: Advice, ettr: float) -> list[tuple[str, ...]]:
    return [
        (
            each.name,
            f"{each.value:g}",
            *("-" if ratio is None else f"{ratio:.2%}" for ratio in (each.halved, each.doubled)),
            f"{each.swing(ettr):.2%}",
        )
        for each in advice.sensitivities
    ]


def as_json(told: Told) -> str:
    """Return the advice for programs. Times are in seconds, sizes in bytes."""
    best = told.advice.best
    value = {
        "recommended": None if best is None else best.name,
        "flags": [] if best is None else list(best.flags),
        "limit": told.limit,
        "parameters": told.job.model.num_parameters,
        "active_parameters": round(told.job.model.active_parameters),
        "alternatives": [_as_object(each) for each in told.advice.alternatives],
        "sensitivities": [asdict(each) for each in told.advice.sensitivities],
        "assumptions": [
            dict(zip(("name", "value", "from"), each, strict=True)) for each in told.assumptions
        ],
        "notes": list(told.notes),
    }
    return json.dumps(value, indent=1)


def _as_object(found: Alternative) -> Mapping[str, Any]:
    value = {**asdict(found), "ettr": found.ettr}
    if found.costs is not None:
        value["time"] = asdict(found.shares)
        value["badput"] = found.shares.badput
        value["failure_s"] = found.costs.failure_s(found.costs.fastest)
    return value


def as_html(told: Told) -> str:
    """Return the advice as one page without scripts and without anything from elsewhere."""
    best = told.advice.best
    fitting = [each for each in told.advice.alternatives if each.ettr]
    return fill_page(
        "plan.html",
        model=html.escape(describe_model(told.job.model)),
        layout=html.escape(describe_layout(told.job)),
        headline=html.escape(told.headline),
        flags="\n".join(map(html.escape, () if best is None else best.flags)),
        limit=html.escape(told.limit),
        keys=key_of_colours([*_LIMITS]),
        shares=_draw_shares([(each.name, each.shares) for each in fitting]),
        alternatives=html_table(_HEADERS, [_cells(each) for each in told.advice.alternatives]),
        problems="".join(
            f"<p>{html.escape(f'{each.name}: {each.problem}')}</p>"
            for each in told.advice.alternatives
            if each.problem
        ),
        tornado="" if best is None else _draw_tornado(told.advice.sensitivities, best.ettr),
        assumptions=html_table(("assumption", "value", "from"), told.assumptions),
        notes="".join(f"<li>{html.escape(line)}</li>" for line in told.notes),
    )


def _draw_shares(rows: Sequence[tuple[str, TimeShares]]) -> str:
    """Return bars of the time that is not training, to the scale of the longest."""
    longest = max((1 - shares.productive for _, shares in rows), default=0.0) or 1.0
    scale, parts = (WIDTH - LEFT - 80) / longest, []
    for row, (name, shares) in enumerate(rows):
        parts.append(label(0, row, name))
        x = float(LEFT)
        for kind in _LIMITS:
            width = scale * shares[kind]
            parts.append(bar(x, width, row, kind))
            x += width
        parts.append(label(x + 6, row, f"{1 - shares.productive:.2%}"))
    return svg(len(rows), "".join(parts))


def _draw_tornado(rows: Sequence[Sensitivity], ettr: float) -> str:
    """Return for each input a bar from the ETTR at half of its value to that at twice."""
    reach = max((each.swing(ettr) for each in rows), default=0.0) or 1.0
    middle = (LEFT + WIDTH) / 2
    scale, parts = (WIDTH - LEFT) / 2 / reach, []
    for row, each in enumerate(rows):
        parts.append(label(0, row, f"{each.name} {each.value:g}"))
        for kind, ratio in (("halved", each.halved), ("doubled", each.doubled)):
            if ratio is not None:
                width = scale * (ratio - ettr)
                parts.append(bar(middle + min(0.0, width), abs(width), row, kind))
    return svg(len(rows), "".join(parts))
