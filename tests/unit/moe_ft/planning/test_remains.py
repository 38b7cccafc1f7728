"""Layouts as planning sees them: boundaries, neighbours, what joins stages."""

import pytest

from moe_ft.errors import PlanError
from moe_ft.format.boundary import Direction
from moe_ft.planning.couplings import Coupling
from moe_ft.planning.remains import PipelineLayout, StageLink
from tests.unit.moe_ft.planning.failures import make_pipelines


def pairs(pipelines: PipelineLayout) -> list[tuple[int, int, Direction]]:
    return [(link.sender, link.receiver, link.direction) for link in pipelines.links]


def test_activations_go_on_and_gradients_come_back_over_each_boundary() -> None:
    assert pairs(make_pipelines(3)) == [
        (0, 1, Direction.FORWARD),
        (1, 0, Direction.BACKWARD),
        (1, 2, Direction.FORWARD),
        (2, 1, Direction.BACKWARD),
    ]


def test_ring_has_a_boundary_from_the_last_stage_to_the_first() -> None:
    on_a_line, on_a_ring = make_pipelines(3), make_pipelines(3, is_ring=True)
    assert set(pairs(on_a_ring)) - set(pairs(on_a_line)) == {
        (2, 0, Direction.FORWARD),
        (0, 2, Direction.BACKWARD),
    }


@pytest.mark.parametrize(("num_stages", "num_links"), [(1, 0), (2, 4), (3, 6)])
def test_ring_of_stages_has_two_links_for_each_stage_unless_it_has_one(
    num_stages: int, num_links: int
) -> None:
    assert len(set(make_pipelines(num_stages, is_ring=True).links)) == num_links


def test_ranks_exchange_tensors_within_their_pipeline() -> None:
    link = StageLink(sender=1, receiver=0, direction=Direction.BACKWARD)
    assert list(make_pipelines(2, 3).wires(link)) == [(3, 0), (4, 1), (5, 2)]


@pytest.mark.parametrize(
    ("couplings", "joined"),
    [([], [{0}, {2, 3}, {5}]), ([(0, 5)], [{0, 5}, {2, 3}]), ([(0, 4)], [{0}, {2, 3}, {5}])],
)
def test_stages_are_joined_by_links_and_by_couplings_of_which_all_stages_are_there(
    couplings: list[tuple[int, ...]], joined: list[set[int]]
) -> None:
    pipelines = make_pipelines(6, couplings=couplings)
    assert pipelines.joined(frozenset({0, 2, 3, 5})) == joined


@pytest.mark.parametrize("stages", [((0, 1), (2,)), ((0,), (0,)), ((0,), (2,))])
def test_layout_in_which_a_rank_is_missing_or_twice_is_refused(
    stages: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(PlanError, match="every rank must be in one stage, and all stages must"):
        PipelineLayout(stages=stages, node_of=("a",) * sum(map(len, stages)))


def test_coupling_of_a_stage_that_does_not_exist_is_refused() -> None:
    coupling = Coupling(stages=(0, 2), reason="a test")
    with pytest.raises(PlanError, match=r"\[\(0, 2\)\] name stages that do not exist: there are 2"):
        PipelineLayout(stages=((0,), (1,)), node_of=("a", "b"), couplings=(coupling,))
