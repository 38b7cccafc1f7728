"""The larger layouts train. test_parity.py compares smaller ones, and features, with stock Megatron."""

from pathlib import Path

import pytest

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events, run_training

# (ranks, layout, changes to the small model)
CASES: dict[str, tuple[int, dict[str, int], dict[str, object]]] = {
    "pp2 ep2 dp2, 8 ranks": (8, {"pp": 2, "ep": 2}, {}),
    "tp2 pp2 ep2, 8 ranks": (8, {"tp": 2, "pp": 2, "ep": 2}, {"sequence_parallel": True}),
    "tp4 sequence parallel": (4, {"tp": 4}, {"sequence_parallel": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_layout_trains_and_loss_falls(case: str, dataset_flags: list[str], tmp_path: Path) -> None:
    world_size, layout, changes = CASES[case]
    flags = model_flags(**changes) + layout_flags(layout) + dataset_flags + event_flags(tmp_path)
    run_training(flags, world_size, log_dir=tmp_path).check()
    losses = [line["loss"] for line in events(tmp_path, world_size - 1, "iteration")]
    assert losses[-1] < losses[0]
    assert all(events(tmp_path, r, "end")[0]["reason"] == "finished" for r in range(world_size))
