"""Numbers get into the writers that Megatron has, under moe-ft/."""

from pathlib import Path

import pytest
from megatron.training import global_vars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.loop.listeners import LoopState
from moe_ft.loop.scalars import Scalars
from tests.unit.fault_tolerance.loops import ended


def test_times_of_an_iteration_are_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = SummaryWriter(str(tmp_path))
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", board)
    Scalars(MegatronLoop(), LoopState(stall_s=0.25)).after_iteration(ended(6))
    board.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert {
        name: [(each.step, each.value) for each in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    } == {"moe-ft/iteration_s": [(6, 2.0)], "moe-ft/stall_s": [(6, 0.25)]}


def test_numbers_of_one_moment_are_one_line_in_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[object, ...]] = []
    writer = type("Wandb", (), {"log": lambda self, *line: lines.append(line)})()
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", writer)
    Scalars(MegatronLoop(), LoopState()).write({"plt": 0.5, "lost_tokens": 7}, iteration=8)
    assert lines == [({"moe-ft/plt": 0.5, "moe-ft/lost_tokens": 7}, 8)]


def test_rank_without_writers_writes_nothing() -> None:
    Scalars(MegatronLoop(), LoopState()).write({"plt": 0.5}, iteration=8)
