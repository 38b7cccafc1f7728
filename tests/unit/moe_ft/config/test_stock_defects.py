"""A job whose `--save` would write shifted masters is told so."""

import pytest

from moe_ft.config.stock_defects import FLAG, lines_on_defects, read_saves

MET = ("--save", "out", FLAG, "--overlap-grad-reduce", "--use-distributed-optimizer")


def test_shifted_masters_are_warned_about_with_flag_and_remedy() -> None:
    (line,) = lines_on_defects(read_saves(["torchrun", "x.py", "--bf16", *MET]))
    assert f"{FLAG} with --save=out" in line
    assert f"save without {FLAG} or without --overlap-grad-reduce" in line


@pytest.mark.parametrize("left_out", MET[2:])
def test_job_without_one_of_the_flags_is_not_warned_about(left_out: str) -> None:
    assert lines_on_defects(read_saves([word for word in MET if word != left_out])) == []


@pytest.mark.parametrize("others", [("--no-save-optim",), ("--ckpt-format", "fsdp_dtensor")])
def test_job_that_saves_no_such_masters_is_not_warned_about(others: tuple[str, ...]) -> None:
    assert lines_on_defects(read_saves([*MET, *others])) == []
    assert lines_on_defects(read_saves(MET[2:])) == []
