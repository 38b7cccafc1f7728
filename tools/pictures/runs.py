"""Pictures of recorded runs: a repair as a timeline of ranks, and one iteration.

The recordings are JSON files next to the pictures; tools/pictures/recording.py makes them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.pictures.svg import Drawing, text_width

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
# Phases of a repair, in the order in which a rank passes through them.
_PHASES = {
    "notice": "amber",
    "free": "amber",
    "build": "violet",
    "meet": "empty",
    "swap": "sand",
    "recover": "blue",
    "catch_up": "mint",
}
_BEFORE_S, _AFTER_S = 1.9, 1.0
Scale = Callable[[float], float]
Part = tuple[float, float, str, str]  # seconds at which it begins and ends, its name, its fill


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def _scale(first: float, last: float, left: float, right: float) -> Scale:
    """Return the function from seconds to pixels."""
    return lambda seconds: left + (seconds - first) / (last - first) * (right - left)


def _draw_axis(drawing: Drawing, x: Scale, ticks: list[float], top: float, bottom: float) -> None:
    for tick in ticks:
        drawing.path([(x(tick), top), (x(tick), bottom)], "line dashed")
        drawing.text(x(tick), bottom + 16, f"{tick:g} s", ink="soft", size=12, anchor="middle")


def draw_repair() -> Drawing:
    """Draw how a job of four ranks loses one and gets another."""
    run = _read("repair")
    ranks = run["ranks"]
    (dead,) = run["dead_ranks"]
    broken = run["broken_iteration"] + 1  # as Megatron counts: the one that it completes
    last_s = max(rank["done"] for rank in ranks)
    seconds = f"{last_s:.1f} s"
    drawing = Drawing(
        860,
        368,
        "A repair in place",
        f"Rank {dead} of {len(ranks)} is killed in iteration "
        f"{broken}. The others keep their processes, a "
        f"replacement is forked, and {seconds} later iteration "
        f"{broken} is finished on all ranks.",
    )
    head = f"Rank {dead} is killed in iteration {broken}; {seconds} later the iteration is finished"
    drawing.text(20, 32, head, size=16, bold=True)
    drawing.legend(
        20,
        58,
        [("green", "iteration"), ("rose", "broken off"), ("mint", "the same iteration again")],
    )
    drawing.legend(
        20,
        80,
        [
            ("amber", "leaves the iteration"),
            ("violet", "new process is set up"),
            ("empty", "waits"),
            ("sand", "new connections"),
            ("blue", "state"),
        ],
    )
    top, height = 104, 48
    x = _scale(-_BEFORE_S, last_s + _AFTER_S, 92, 840)
    ticks = [float(tick) for tick in range(-1, int(last_s + _AFTER_S) + 1)]
    _draw_axis(drawing, x, ticks, top, top + len(ranks) * height)
    for row, rank in enumerate(ranks):
        _draw_rank(drawing, x, rank, top + row * height, broken, last_s)
    row = next(index for index, rank in enumerate(ranks) if rank["was_replaced"])
    y = top + row * height
    drawing.path([(x(0) - 7, y + 8), (x(0) + 7, y + height - 8)], "cross")
    drawing.path([(x(0) - 7, y + height - 8), (x(0) + 7, y + 8)], "cross")
    _draw_outcome(drawing, run)
    return drawing


def _draw_outcome(drawing: Drawing, run: dict[str, Any]) -> None:
    """Write what the recording shows; refuse one whose run ended in another state."""
    if run["digests"] != run["digests_without_failure"]:
        raise ValueError(
            "docs/pictures/repair.json: the run did not end like the one without a failure"
        )
    ranks = run["ranks"]
    kept = sum(rank["kept_its_process"] for rank in ranks)
    text = (
        f"{kept} of {len(ranks)} processes stay. At the end the state of every rank "
        "is, bit for bit, that of the same run without the kill."
    )
    drawing.text(20, 338, text, ink="soft", size=12)
    text = (
        "Recorded from docs/pictures/repair.json: pretrain_gpt_moe.py, 4 "
        "ranks on 2 CPU cores with other work, gloo, no GPU."
    )
    drawing.text(20, 356, text, ink="soft", size=12)


def _draw_rank(
    drawing: Drawing, x: Scale, rank: dict[str, Any], y: float, broken: int, last_s: float
) -> None:
    """Draw one row: iterations before, phases of the repair, iterations after it."""
    height = 32
    drawing.text(20, y + 21, f"rank {rank['rank']}", size=13)
    drawing.text(20, y + 35, "replaced" if rank["was_replaced"] else "", ink="soft", size=11)
    before = [each for each in rank["iterations"] if each[2] <= 0]
    after = [each for each in rank["iterations"] if each[1] >= rank["done"] - 0.01]
    for number, begin, end in (*before, *after):
        first, last = max(begin, -_BEFORE_S), min(end, last_s + _AFTER_S)
        if last - first > 0.05:
            width = x(last) - x(first) - 1.5
            drawing.box(x(first), y + 5, width, height, "green")
            if width > 24:
                text = str(number)
                drawing.text(x(first) + width / 2, y + 26, text, ink="on", size=12, anchor="middle")
    drawing.box(x(before[-1][2]), y + 5, x(0) - x(before[-1][2]) - 1.5, height, "rose")
    at = 0.0
    for name, fill in _PHASES.items():
        if (took := rank["phases"].get(name, 0)) > 0:
            drawing.box(x(at), y + 5, max(1, x(at + took) - x(at) - 1), height, fill, radius=1)
            if name == "catch_up":
                middle = x(at + took / 2)
                drawing.text(middle, y + 26, str(broken), size=12, anchor="middle")
        at += took


def draw_iteration() -> Drawing:
    """Draw what the threads and processes of one rank do during one iteration."""
    run = _read("iteration")
    phases, last_s = run["phases"], run["next"]
    first_s, shown_s = run["copy"][0] - 0.03 * last_s, last_s * 1.5
    drawing = Drawing(
        860,
        352,
        "One iteration with a checkpoint",
        "While forward and backward run, another thread copies the "
        "state to host memory. The optimizer waits "
        "until the copy is done; commit, send and persist run in "
        "parallel with the next iteration.",
    )
    drawing.text(
        20,
        32,
        "One iteration of one rank, with a snapshot that also goes to storage",
        size=16,
        bold=True,
    )
    x = _scale(first_s, shown_s, 164, 836)
    top, height = 66, 52
    ticks = [round(0.2 * tick, 1) for tick in range(int(shown_s / 0.2) + 1)]
    _draw_axis(drawing, x, ticks, top - 8, top + 4 * height)
    steps = [
        ("forward", "backward", "forward", "green"),
        ("backward", "before-step", "backward", "green"),
        ("before-step", "step", "fence", "red"),
        ("step", "between", "step", "amber"),
    ]
    lanes = [
        ("training thread", [(phases[a], phases[b], text, fill) for a, b, text, fill in steps]),
        ("copy worker", [(*run["copy"], "copy", "blue"), (*run["commit"], "commit", "violet")]),
        ("sending worker", [(*run["send"], "send to a peer", "blue")]),
        (
            "writer process",
            [(*run["persist"], f"write and read back, to {run['persist'][1]:.1f} s", "violet")],
        ),
    ]
    lanes[0][1].append((last_s, shown_s, "next iteration", "mint"))
    for row, (name, parts) in enumerate(lanes):
        y = top + row * height
        drawing.text(20, y + 24, name)
        _draw_lane(drawing, x, y, parts, shown_s)
    megabytes = run["bytes"] / 1e6
    wait = (phases["step"] - phases["before-step"]) * 1e3
    text = (
        f"The snapshot of this rank is {megabytes:.0f} MB. At the fence "
        f"training waited {wait:.1f} ms for its copy."
    )
    drawing.text(20, 322, text, ink="soft", size=12)
    text = (
        "Recorded from docs/pictures/iteration.json: pretrain_gpt_moe.py, 2 "
        "ranks that share 2 CPU cores, gloo, no GPU."
    )
    drawing.text(20, 340, text, ink="soft", size=12)
    return drawing


def _draw_lane(drawing: Drawing, x: Scale, y: float, parts: list[Part], shown_s: float) -> None:
    """Draw bars with their names in them; names of narrow bars are above, or after the last one."""
    narrow = []
    for begin, end, text, fill in parts:
        first, last = x(begin), x(min(end, shown_s))
        width = max(2.0, last - first - 1)
        drawing.box(first, y + 8, width, 24, fill, radius=2)
        if text_width(text, 12) < width - 4:
            ink = "ink" if fill == "mint" else "dark" if fill == "amber" else "on"
            drawing.text(first + width / 2, y + 24, text, ink=ink, size=12, anchor="middle")
        else:
            narrow.append((first, text))
    if len(narrow) == len(parts):
        names = ", then ".join(text for _, text in narrow)
        drawing.text(x(parts[-1][1]) + 8, y + 24, names, ink="soft", size=12)
    else:
        for first, text in narrow:
            drawing.text(first, y + 5, text, ink="soft", size=11)
