"""Advice of `python -m moe_ft plan` in words: as text, as JSON, and as a page of HTML.

plan_advice.py has the numbers, presets/plan.html the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup

from moe_ft.commands.pages import LEFT, WIDTH, Answer, bar, key_of_colours, label, svg
from moe_ft.commands.plan_advice import EVEN, REACH, Advice, Alternative, Turn
from moe_ft.commands.plan_command import StartCommand
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.time_shares import Spent, TimeShares

_HEADERS = (
    *(
        "alternative",
        "ETTR",
        "lost in a week",
        "every",
        "stall",
        "recovery",
        "again",
        "tokens lost",
    ),
    *("host memory of a node", "to storage", "on storage"),
)
# The remedy of each share of the time that is not training.
_LIMITS = {
    Spent.BLOCKED: "training waits for checkpoints: a longer interval or window, or more bandwidth to the "
    "host",
    Spent.RECOVERING: "recoveries take long before iterations run again: faster starts, as with "
    "`python -m moe_ft keep`, or --moe-ft-repair auto where a start accepts it",
    Spent.REDONE: "iterations run again after failures: a shorter interval or window, or more bandwidth to "
    "peers and storage",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """All that is told of a job.

    Attributes:
        begin: the command that starts it with the recommended flags.
        assumptions: by name, values and where they come from.
        notes: on what is not counted.
    """

    job: PlannedJob
    advice: Advice
    begin: StartCommand
    assumptions: Sequence[tuple[str, str, str]]
    notes: Sequence[str]


def word(told: Told) -> Answer:
    """Return advice in words."""
    best, found = told.advice.best, told.advice.alternatives
    flags: tuple[str, ...] = ()
    headline, ettr = "nothing fits or starts: the table says what each alternative needs", 0.0
    command, fill_in = "", ""
    limit = "fewer replicas, other formats (--moe-ft-state-dtype) or more nodes need less of a node"
    if best is not None:
        flags, ettr = best.flags, best.ettr
        lossy = "" if best.is_exact else "; recoveries lose tokens"
        headline = (
            f"recommended: {best.name}, {_percent(ettr)} of the time is training (ETTR), "
            f"{_hours(best.lost_hours)} of a week are lost{lossy}"
        )
        command, names = told.begin.text, told.begin.placeholders
        fill_in = f"Fill in {', '.join(names)}." if names else ""
        most = max(_LIMITS, key=lambda name: best.shares[name])
        limit = f"{best.shares[most]:.2%} of the time: {_LIMITS[most]}"
    turns, gain, assumed = _turns(told.advice), _gain(told), _assumed(told)
    claims = "\n".join(filter(None, (gain, assumed)))
    return Answer(
        job=told.job,
        headline=headline,
        headers=_HEADERS,
        rows=[_cells(each) for each in found],
        problems=[
            f"{each.name}: {each.problem or f'refused: {each.refusal}'}"
            for each in found
            if each.problem or each.refusal
        ],
        shares={} if best is None else {best.name: best.shares},
        assumptions=told.assumptions,
        notes=told.notes,
        page="plan.html",
        first="\n\n".join(filter(None, (claims, _indented(command), fill_in))),
        last="\n".join((f"what limits it: {limit}", *(["", *turns] if turns else []))),
        values={
            "recommended": None if best is None else best.name,
            "flags": list(flags),
            "command": command,
            "gain": gain,
            "limit": limit,
            "turns": [asdict(each) for each in told.advice.turns],
            "parameters": told.job.model.num_parameters,
            "active_parameters": round(told.job.model.active_parameters),
            "alternatives": [_as_object(each) for each in found],
        },
        parts={
            "command": command,
            "claims": [each for each in (gain, assumed) if each],
            "fill_in": fill_in,
            "turns": turns,
            "limit": limit,
            "keys": key_of_colours([*_LIMITS]),
            "shares": _draw_shares([(each.name, each.shares) for each in found if each.ettr]),
        },
    )


def _percent(share: float) -> str:
    """Return a share of the time, which is never all of it."""
    text = f"{share:.2%}"
    return "> 99.99%" if text == "100.00%" else text


def _hours(hours: float) -> str:
    return f"{hours:.2f} h" if hours < 10 else f"{hours:.1f} h"


def _gain(told: Told) -> str:
    """Return what the recommendation saves of what the user does now; empty if either is not known."""
    best, usual, job = told.advice.best, told.advice.usual, told.job
    if best is None or usual is None:
        return ""
    hours = usual.lost_hours - best.lost_hours
    than = f"{usual.name}, which loses {_hours(usual.lost_hours)} ({_percent(usual.ettr)} ETTR)"
    if hours <= 0:
        return f"gain: none over {than}"
    return f"gain: {_hours(hours)} of a week ({hours * job.num_ranks:,.0f} rank-hours) over {than}"


def _assumed(told: Told) -> str:
    """Return which values of ETTR nobody has measured; empty if there are none."""
    names = [name for name, _, source in told.assumptions if source.startswith("assumed: ")]
    if not names:
        return ""
    return f"these are assumed, not measured: {', '.join(names)} (below; --from-run DIR measures)"


def _cells(found: Alternative) -> tuple[str, ...]:
    costs = found.costs
    if costs is None:
        return (found.name, "cannot be", *[""] * (len(_HEADERS) - 2))
    kind = costs.fastest
    verdict = "does not fit" if found.problem else "refused" if found.refusal else ""
    return (
        found.name,
        verdict or _percent(found.ettr),
        "" if verdict else _hours(found.lost_hours),
        f"{costs.interval:g} iterations",
        f"{costs.blocked_s:.3f} s",
        f"{costs.recoveries[kind].ready_s:.1f} s ({kind})",
        f"{costs.recoveries[kind].replay_s + costs.redo_s(kind):.1f} s",
        f"{costs.lost_iterations:.1f} iterations" if costs.lost_iterations else "none",
        f"{found.node_bytes / 2**30:,.0f} GiB",
        f"{costs.storage_bytes / costs.iteration_s / 1e6:,.1f} MB/s a rank",
        f"{found.stored_bytes / 1e9:,.0f} GB",
    )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _turns(advice: Advice) -> list[str]:
    """Return what would change the advice: values of inputs, most of which are assumed."""
    if not advice.turns:
        return []
    lines = [f"what would change the recommendation ({EVEN:.2%} of the time and less is even):"]
    return [*lines, *map(_turn, advice.turns)]


def _turn(turn: Turn) -> str:
    unit, scale, form = ("s", 1.0, ",.0f") if turn.name == "--mtbf-s" else ("GB/s", 1e-9, ".2g")
    least, now, most = (f"{scale * turn.value * each:{form}}" for each in (1 / REACH, 1, REACH))
    if turn.at is None:
        return f"  {turn.name}: nothing from {least} to {most} {unit}"
    side = "below" if turn.at < turn.value else "above"
    return f"  {turn.name}: {turn.other} {side} {scale * turn.at:{form}} {unit} ({now} now)"


def _as_object(found: Alternative) -> Mapping[str, Any]:
    value = {**asdict(found), "ettr": found.ettr}
    if found.costs is not None:
        value["time"] = asdict(found.shares)
        value["badput"] = found.shares.badput
        value["failure_s"] = found.costs.failure_s(found.costs.fastest)
    return value


def _draw_shares(rows: Sequence[tuple[str, TimeShares]]) -> Markup:
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
