"""The loss counts the tokens of its mask, and splits that leave a part of the data empty are refused."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import (
    RerunMode,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)

from megatron.fault_tolerance.program.forward_step import check_splits, loss_function, needs_batch
from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from moe_ft.errors import ConfigError

LOSSES = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])


@pytest.fixture
def args(loop_args: Namespace) -> Namespace:
    loop_args.check_for_nan_in_loss_and_grad = False
    loop_args.mtp_num_layers = None
    return loop_args


def test_loss_is_summed_over_the_tokens_that_count(args: Namespace) -> None:
    total, num_tokens, logged = loss_function(MASK, LOSSES)
    assert float(total) == 1.0 + 4.0 + 32.0
    assert num_tokens.dtype is torch.int32
    assert int(num_tokens) == 3
    assert logged["lm loss"].tolist() == [37.0, 3.0]


@pytest.mark.parametrize(("value", "words"), [("nan", "is NaN"), ("inf", "is infinite")])
def test_loss_that_is_not_finite_ends_training_where_it_is_checked(
    value: str, words: str, args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # without a GPU
    bad = LOSSES.clone()
    bad[0, 0] = float(value)
    loss_function(MASK, bad)
    args.check_for_nan_in_loss_and_grad = True
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    try:
        with pytest.raises(RuntimeError, match=words):
            loss_function(MASK, bad)
    finally:
        destroy_rerun_state_machine()


@pytest.mark.parametrize(("rank", "needs"), [(0, True), (1, False), (2, True)])
def test_first_and_last_stage_read_data(
    rank: int, needs: bool, args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 3)
    assert needs_batch(None) is needs


@pytest.fixture
def data_args(tmp_path: Path) -> Namespace:
    """Return arguments that name a dataset of ten documents."""
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text(f"text {index}\n")
    files = tuple(str(path) for path in sorted(tmp_path.glob("*.txt")))
    write_dataset(TextSource(paths=files), tmp_path / "data")
    return Namespace(
        mock_data=False,
        data_path=[str(tmp_path / "data")],
        split="80,10,10",
        mmap_bin_files=True,
        **dict.fromkeys(
            (
                *("data_args_path", "per_split_data_args_path", "train_data_path"),
                *("valid_data_path", "test_data_path"),
            )
        ),
    )


def test_split_with_documents_for_every_part_is_accepted(data_args: Namespace) -> None:
    check_splits(data_args)


def test_part_without_a_document_is_refused_with_its_name_and_the_remedy(
    data_args: Namespace,
) -> None:
    data_args.split = "99,1,0"
    with pytest.raises(ConfigError) as refusal:
        check_splits(data_args)
    for words in ("--split=99,1,0 leaves the valid part", "there are 10", "--split 80,10,10"):
        assert words in str(refusal.value)


def test_part_that_is_not_wanted_needs_no_document(data_args: Namespace) -> None:
    data_args.split = "100,0,0"
    check_splits(data_args)


@pytest.mark.parametrize(
    "changes", [{"mock_data": True}, {"data_path": None}, {"data_path": ["s3://bucket/data"]}]
)
def test_data_that_are_not_files_are_not_looked_at(
    changes: dict[str, object], data_args: Namespace
) -> None:
    vars(data_args).update({**changes, "split": "99,1,0"})
    check_splits(data_args)
