"""Pieces of experts lie on the nodes of their ranks."""

from moe_ft.planning.lost_ranks import Layout
from moe_ft.planning.spares import _pieces_on_nodes


def layout(stages: int, dp: int, ep: int) -> Layout:
    return Layout(num_stages=stages, tp=1, cp=1, dp=dp, ep=ep)


def test_pieces_of_experts_lie_on_the_nodes_of_their_ranks() -> None:
    assert _pieces_on_nodes(layout(2, 4, 2), 2, ((0,), (1,))) == [
        ((0, 1), (0, 1), (), ()),
        ((), (), (0, 1), (0, 1)),
    ]
    assert _pieces_on_nodes(layout(1, 2, 2), 1, ((0, 2), (1, 2))) == [((0, 2), (1, 2))]
    rows = ((0,), (1,), (2,), (3,))
    assert _pieces_on_nodes(layout(1, 4, 4), 3, rows) == [((0, 1, 2), (3,))]
