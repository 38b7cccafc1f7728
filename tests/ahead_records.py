"""Training that compares, in every iteration, the record taken ahead of its end with that of its end."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import pretrain_gpt_moe
from moe_ft.engine.breakpoints import Breakpoints, Moment
from moe_ft.state.record import encode


def train_comparing(folder: str, flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py; write the iterations that were compared, and fields that differ."""
    end_update, note = Breakpoints.end_update, Breakpoints.note
    ahead: dict[int, dict[str, Any]] = {}
    compared: dict[int, list[str]] = {}

    def end_update_keeping(self: Breakpoints, moment: Moment | None, problem: str = "") -> None:
        if moment is not None:
            ahead[moment.iteration] = _encoded(self, moment)
        end_update(self, moment, problem)

    def note_comparing(self: Breakpoints, moment: Moment | None, problem: str = "") -> None:
        if moment is not None and (before := ahead.pop(moment.iteration, None)) is not None:
            after = _encoded(self, moment)
            different = [name for name, value in after.items() if before[name] != value]
            compared[moment.iteration] = different
        note(self, moment, problem)

    Breakpoints.end_update, Breakpoints.note = end_update_keeping, note_comparing  # type: ignore[method-assign]
    try:
        pretrain_gpt_moe.main(flags)
    finally:
        name = f"compared_{os.environ['RANK']}.json"
        (Path(folder) / name).write_text(json.dumps(compared))


def comparisons(folder: Path) -> list[dict[str, list[str]]]:
    """Return of each rank, by iteration, the fields that differed."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("compared_*.json"))]


def _encoded(breakpoints: Breakpoints, moment: Moment) -> dict[str, Any]:
    values = moment.record.values
    optimizers = [dict(each) for each in values["optimizers"]]
    record = replace(moment.record, values={**values, "optimizers": optimizers})
    breakpoints._records._complete(record)
    found: dict[str, Any] = msgspec.to_builtins(encode(record))
    return found
