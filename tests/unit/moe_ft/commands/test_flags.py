"""`moe_ft flags` lists flags with their defaults and needs, those that most jobs give first."""

import re

import pytest

from moe_ft.cli import main
from moe_ft.commands.flags import groups
from moe_ft.config.flags import BASIC


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["flags", *words]) == 0
    return capsys.readouterr().out


def flags_in(text: str) -> list[str]:
    return re.findall(r"^  (--moe-ft-[\w-]+)", text, re.MULTILINE)


def test_list_has_the_basic_flags_alone_and_says_where_the_others_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys)
    assert [each[9:].replace("-", "_") for each in flags_in(text)] == [*BASIC]
    others = sum(map(len, groups().values())) - len(BASIC)
    assert text.endswith(
        f"moe_ft flags --all lists {others} more, moe_ft flags NAME says all about one.\n"
    )


def test_list_of_all_has_every_flag_once_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "--all")
    assert flags_in(text) == [each.name for found in groups().values() for each in found]
    assert " ".join(text.split()).count("(default: ") == len(flags_in(text))
    assert "moe_ft: strategy sparse:\n" in text


WINDOW = """--moe-ft-window {N,auto}
  snapshots of consecutive iterations that together hold every unit; auto = as
  few as cost no time, measured while training
  default: auto
  needs: --moe-ft-strategy sparse
  more: docs/sparse.md
"""


@pytest.mark.parametrize("name", ["window", "--moe-ft-window"])
def test_flag_is_described_by_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, name) == WINDOW


def test_part_of_a_name_finds_all_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "state_d")
    found = re.findall(r"^--moe-ft-\S+", text, re.MULTILINE)
    assert found == [
        "--moe-ft-state-dtype",
        "--moe-ft-state-digest",
        "--moe-ft-state-digest-interval",
    ]
    assert "--moe-ft-state-digest\n  write a SHA-256" in text  # a switch takes no value
    assert "\n  default: off\n" in text


def test_name_that_is_in_no_flag_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["flags", "stategy"]) == 2
    assert "Did you mean --moe-ft-strategy? " in capsys.readouterr().err
