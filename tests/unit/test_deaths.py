"""docs/when_something_dies.md: each cell of its matrix is filled, and what shows a row exists."""

import re

import pytest

from tests.unit.source import ROOT

PAGE = (ROOT / "docs" / "when_something_dies.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what died")
]
FOLDERS = ("tests/cluster", "tests/distributed", "tests/slurm")
VALUES = ("crowd", "wait", "reroute", "shrink", "end")  # of --moe-ft-without-spare


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_row_of_the_matrix_says_what_happens_and_names_what_shows_it(row: list[str]) -> None:
    died, happens, costs, shown = row
    assert all((died, happens, costs)) and "not known" not in " ".join(row)
    names = re.findall(r"`([\w.]+)`", shown)
    assert names
    for name in names:
        assert any((ROOT / folder / name).is_file() for folder in FOLDERS), name


def test_matrix_has_a_row_for_each_transcript_and_each_answer_to_a_lost_node() -> None:
    shown = {name for row in ROWS for name in re.findall(r"`([\w.]+\.txt)`", row[3])}
    assert shown == {path.name for path in (ROOT / "tests" / "cluster").glob("*.txt")}
    for value in VALUES:
        assert any(f"a node without a spare: `{value}`" in row[0] for row in ROWS), value
