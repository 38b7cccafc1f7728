"""docs/when_something_dies.md: each cell of its matrix is filled, and what shows a row exists.

The block that a start prints promises the same answers.
"""

import itertools
import re
from typing import get_args

import pytest

from moe_ft.cluster.law import answer_to
from moe_ft.cluster.membership import Job, Node, Policy, RankReports, Shape, WithoutSpare
from moe_ft.planning.protection import Launcher, LossAnswer, Starter, block_of
from tests.unit.moe_ft.planning.test_protection import protection_of
from tests.unit.source import ROOT

PAGE = (ROOT / "docs" / "when_something_dies.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what died")
]
FOLDERS = ("tests/cluster", "tests/distributed", "tests/slurm")
VALUES = ("crowd", "share", "wait", "shrink", "end")  # of --moe-ft-without-spare


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


@pytest.mark.parametrize("without_spare", get_args(WithoutSpare))
def test_block_of_a_start_promises_what_the_law_answers_to_a_lost_node(
    without_spare: WithoutSpare,
) -> None:
    """Of two nodes the second is lost, after an iteration, with a spare and without one."""
    for repair, most, fewest in itertools.product((True, False), (0, 3), (0, 1)):
        policy = Policy(
            shape=Shape(2, 1, fewest),
            repair=repair,
            without_spare=without_spare,
            max_restarts=most,
        )
        starter = Starter(
            launcher=Launcher.AGENT,
            max_restarts=most,
            without_spare=without_spare if repair else "",
            is_watched=True,
            shrinks=fewest > 0,
        )
        kept = protection_of(starter=starter)
        (line,) = (each.text for each in block_of(kept) if "  lost node " in each.text)
        for has_spare in (True, False):
            left = ["a", "c"] if has_spare else ["a"]
            job = Job(
                policy=policy,
                nodes={id: Node(id=id, name=id, number=number) for number, id in enumerate(left)},
                seats={0: "a"},
                names={0: "a", 1: "b"},
                size=2,
                reports=RankReports(trained=True),
            )
            lost = Node(id="b", name="b", number=1)
            found = answer_to(job, [lost], frozenset([1]))
            promised = line.partition("without one ")[2] or line if not has_spare else ""
            how = {
                "repair": LossAnswer.REPAIR,
                "start": LossAnswer.RESTART,
                "over": LossAnswer.END,
            }[found.how]
            if has_spare:
                assert kept.lost_node is how, (repair, most, fewest)
            elif found.hosts:
                assert "a node that trains runs its ranks" in promised
                assert ("peers share" in promised) == (without_spare == "share")
            elif how is LossAnswer.REPAIR:
                assert "training waits until one registers" in promised
            else:
                assert ("all ranks start again" in promised) == (how is LossAnswer.RESTART)
                assert ("the job ends" in promised) == (how is LossAnswer.END)
