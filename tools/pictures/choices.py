"""Picture of the exact strategy that `plan` recommends, by the speed of copies to the host and of failures.

    python -m tools.pictures.choices

asks the planner, and writes what it says into docs/pictures/strategies.json, which is drawn here.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ft.commands.plan import advisor_of
from moe_ft.commands.plan_advice import Advisor
from tools.pictures.svg import Drawing

RECORD = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "strategies.json"
CLUSTER = "dgx-h100"
BANDWIDTHS_GB = (1, 1.4, 2, 2.8, 4, 5.6, 8, 11, 16, 23, 32, 45, 64)
MTBFS_S = {
    "10 min": 600,
    "20 min": 1200,
    "1 h": 3600,
    "2 h": 7200,
    "4 h": 14400,
    "8 h": 28800,
    "1 day": 86400,
}
MODELS = ("deepseek-v3", "deepseek-moe-16b")
_FILLS = {"dense": "pale", "sparse": "green"}
_LEFT, _STEP, _HEIGHT = 96, 57, 26


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Recommendation of the planner for one job.

    Attributes:
        strategy: that it recommends.
        gain: of ETTR over the best other exact strategy, in points.
    """

    strategy: str
    gain: float


def ask(advisor: Advisor, bandwidth_gb: float, mtbf_s: float) -> Cell:
    """Return what an advisor recommends with other values."""
    asked = advisor.with_input("bandwidth", bandwidth_gb * 1e9).with_input("mtbf_s", float(mtbf_s))
    advice = asked.compare_exact()
    assert advice.best is not None
    strategy = advice.best.name.split()[0]
    others = [each.ettr for each in advice.alternatives if not each.name.startswith(strategy)]
    return Cell(strategy=strategy, gain=round(100 * (advice.best.ettr - max(others)), 2))


def record() -> dict[str, Any]:
    """Return what the planner says of all models, speeds and times between failures."""
    found = {}
    for model in MODELS:
        advisor = advisor_of(["--model", model, "--cluster", CLUSTER])
        job = advisor.job
        found[model] = {
            "gpus": job.num_ranks,
            "iteration_s": round(job.measured.iteration_s or 0.0, 2),
            "gigabytes": round(job.heaviest.full_bytes / 1e9, 2),
            "cells": [
                [(cell := ask(advisor, speed, mtbf_s)).strategy, cell.gain]
                for mtbf_s in MTBFS_S.values()
                for speed in BANDWIDTHS_GB
            ],
        }
    command = "python -m tools.pictures.choices  # plans with each exact --moe-ft-strategy"
    return {"command": command, "models": found}


def draw_strategies() -> Drawing:
    """Draw a map of recommendations for each model."""
    models = json.loads(RECORD.read_text())["models"]
    block = len(MTBFS_S) * _HEIGHT + 92
    drawing = Drawing(
        860,
        98 + block * len(models),
        "Which exact strategy the planner recommends",
        "Dense wins wherever a copy of the whole state is hidden in an iteration. Sparse wins where it is "
        "not: with DeepSeek-MoE 16B from 1.4 to 4 GB/s to the host.",
    )
    drawing.text(20, 32, "Which exact strategy `plan` recommends", size=16, bold=True)
    drawing.legend(20, 58, [("pale", "dense, or even: it needs less memory"), ("green", "sparse")])
    text = "Numbers: points of ETTR more than the best of the other strategy, with restarts of 5 minutes."
    drawing.text(20, 80, text, ink="soft", size=12)
    for number, (name, model) in enumerate(models.items()):
        _draw_model(drawing, name, model, 112 + number * block)
    return drawing


def _draw_model(drawing: Drawing, name: str, model: dict[str, Any], top: float) -> None:
    needed = model["gigabytes"] / model["iteration_s"]
    head = f"{name}, {model['gpus']:,} H100, an iteration of {model['iteration_s']:g} s"
    drawing.text(20, top, head, bold=True)
    text = f"{model['gigabytes']:g} GB of a GPU fit into an iteration from {needed:.2g} GB/s on"
    drawing.text(840, top, text, ink="soft", size=12, anchor="end")
    grid = top + 12
    for row, label in enumerate(MTBFS_S):
        y = grid + row * _HEIGHT
        drawing.text(_LEFT - 10, y + 17, label, size=12, anchor="end")
        for column in range(len(BANDWIDTHS_GB)):
            strategy, gain = model["cells"][row * len(BANDWIDTHS_GB) + column]
            x = _LEFT + column * _STEP
            text = f"+{gain:.1f}" if gain >= 0.05 else "even"
            ink = "on" if strategy == "sparse" else "ink"
            size = (_STEP - 3, _HEIGHT - 3)
            drawing.label(x, y, *size, _FILLS[strategy], [text], ink=ink, size=11)
    bottom = grid + len(MTBFS_S) * _HEIGHT
    for column, speed in enumerate(BANDWIDTHS_GB):
        middle = _LEFT + column * _STEP + (_STEP - 3) / 2
        drawing.text(middle, bottom + 14, f"{speed:g}", ink="soft", size=12, anchor="middle")
    drawing.text(20, bottom + 14, "GB/s", ink="soft", size=12)
    text = "down: mean time between failures of the job; across: from each GPU to the host"
    drawing.text(_LEFT, bottom + 32, text, ink="soft", size=12)


def main() -> None:
    """Ask the planner, and write what it says."""
    RECORD.write_text(json.dumps(record()) + "\n")


if __name__ == "__main__":
    main()
