"""A split that leaves a part of the data without a document is refused, as Megatron would wait for ever."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron.fault_tolerance.program.data import check_splits
from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from moe_ft.errors import ConfigError


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
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


def test_split_with_documents_for_every_part_is_accepted(args: Namespace) -> None:
    check_splits(args)


def test_part_without_a_document_is_refused_with_its_name_and_the_remedy(args: Namespace) -> None:
    args.split = "99,1,0"
    with pytest.raises(ConfigError) as refusal:
        check_splits(args)
    for words in ("--split=99,1,0 leaves the valid part", "there are 10", "--split 80,10,10"):
        assert words in str(refusal.value)


def test_part_that_is_not_wanted_needs_no_document(args: Namespace) -> None:
    args.split = "100,0,0"
    check_splits(args)


@pytest.mark.parametrize(
    "changes", [{"mock_data": True}, {"data_path": None}, {"data_path": ["s3://bucket/data"]}]
)
def test_data_that_are_not_files_are_not_looked_at(
    changes: dict[str, object], args: Namespace
) -> None:
    vars(args).update({**changes, "split": "99,1,0"})
    check_splits(args)
