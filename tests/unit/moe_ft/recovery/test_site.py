"""Place of a rank: the one rank that acts for its node, and lines for people."""

from dataclasses import replace

import pytest

from moe_ft.recovery.site import Site, say_for_node
from moe_ft.topology import RankInfo, Topology
from tests.unit.moe_ft.recovery import starts

NODES = ("b", "a", "b", "a", "c")


def sites() -> list[Site]:
    ranks = tuple(
        RankInfo(rank=rank, node=node, stage=0, pid=1, address=None, region_bytes=1)
        for rank, node in enumerate(NODES)
    )
    topology = Topology(ranks=ranks)
    return [
        replace(starts.site(), node=node, rank=rank, topology=topology)
        for rank, node in enumerate(NODES)
    ]


@pytest.mark.parametrize(
    ("lines", "printed"),
    [
        (["", "", "", "", ""], []),
        (["0", "1", "2", "3", "4"], ["0", "1", "4"]),
        (["", "", "2", "3", ""], ["2", "3"]),
    ],
)
def test_line_for_a_node_is_printed_by_its_lowest_rank_that_has_one(
    capsys: pytest.CaptureFixture[str], lines: list[str], printed: list[str]
) -> None:
    for site in sites():
        say_for_node(site, lines)
    assert capsys.readouterr().err.splitlines() == [f"moe_ft: {each}" for each in printed]
