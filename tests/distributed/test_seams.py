"""With strategy none the seams change nothing, bit for bit; the same command gives the same bits."""

import json
from pathlib import Path

import pytest

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import digests, run_ranks, run_training
from tests.stock import train_and_digest

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EVALUATION = {"eval_interval": 2, "eval_iters": 1}
CASES = {
    "pp2 ep2, dropout, evaluation": (4, {"pp": 2, "ep": 2}, DROPOUT | EVALUATION),
    "tp2 ep2, dropout": (4, {"tp": 2, "ep": 2}, DROPOUT | {"sequence_parallel": True}),
    "virtual stages, fp16, evaluation": (
        2,
        {"pp": 2},
        EVALUATION
        | {"num_layers_per_virtual_pipeline_stage": 1, "bf16": False, "fp16": True}
        | {"initial_loss_scale": 4096},
    ),
    "ep2 dp2, no distributed optimizer": (4, {"ep": 2}, {"use_distributed_optimizer": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_installing_the_seams_changes_no_bit(
    case: str, dataset_flags: list[str], tmp_path: Path
) -> None:
    world_size, layout, changes = CASES[case]
    flags = model_flags(**changes) + layout_flags(layout) + dataset_flags
    ends = []
    for with_seams in (False, True):
        folder = tmp_path / f"seams_{with_seams}"
        log_flags = ["--moe-ft-event-log", str(folder / "events")] if with_seams else []
        arguments = (flags + log_flags, with_seams, str(folder))
        run_ranks(train_and_digest, world_size, *arguments, log_dir=folder).check()
        ends.append(
            [json.loads((folder / f"digest_{r}.json").read_text()) for r in range(world_size)]
        )
    assert ends[0] == ends[1]


def test_two_runs_of_the_same_command_end_with_equal_digests(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    layout = layout_flags({"pp": 2, "ep": 2})
    flags = model_flags(**DROPOUT) + layout + dataset_flags
    ends = []
    for name in ("first", "second"):
        folder = tmp_path / name
        run_training(flags + event_flags(folder), 4, log_dir=folder).check()
        ends.append(digests(folder, 4))
    assert ends[0] == ends[1]


def test_another_seed_gives_another_digest(dataset_flags: list[str], tmp_path: Path) -> None:
    ends = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        flags = model_flags(seed=seed, train_iters=1) + dataset_flags + event_flags(folder)
        run_training(flags, 1, log_dir=folder).check()
        ends.append(digests(folder, 1))
    assert ends[0] != ends[1]
