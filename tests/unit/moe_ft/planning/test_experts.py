"""Experts of a stage: where they are, which of them are trained, and how many tokens they will get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.experts import ExpertFacts, ExpertLayout, experts_of_stage
from moe_ft.units import UnitId, UnitKind


def expert(layer: int, number: int, block: str = "decoder") -> UnitId:
    return UnitId(kind=UnitKind.EXPERT, block=block, layer=layer, expert=number)


def test_planned_tokens_are_those_of_all_samples() -> None:
    facts = ExpertFacts(
        num_experts=8,
        ep_rank=0,
        ep_size=2,
        tokens_per_sample=64,
        planned_samples=100,
        samples_per_iteration=4,
    )
    assert (facts.planned_tokens, facts.tokens_per_iteration) == (6400, 256)


@given(st.integers(1, 4), st.integers(1, 4))
def test_interleaved_order_has_every_expert_once_and_neighbors_on_neighboring_ranks(
    ep_size: int, num_local: int
) -> None:
    layout = ExpertLayout(num_layers=1, num_experts=ep_size * num_local, ep_size=ep_size)
    order = [layout.expert_at(position) for position in range(layout.num_experts)]
    assert sorted(order) == list(range(layout.num_experts))
    assert [layout.rank_of(each) for each in order] == [*range(ep_size)] * num_local
    assert layout.expert_at(layout.num_experts) == order[0]


@pytest.mark.parametrize(("num_experts", "ep_size"), [(0, 1), (3, 2), (4, 0)])
def test_experts_that_cannot_be_divided_equally_are_refused(num_experts: int, ep_size: int) -> None:
    with pytest.raises(PlanError, match=f"{num_experts} experts cannot be divided equally among"):
        ExpertLayout(num_layers=1, num_experts=num_experts, ep_size=ep_size)


def test_layers_begin_where_the_one_before_has_ended() -> None:
    layout = ExpertLayout(num_layers=3, num_experts=4, ep_size=2)
    assert layout.first_cursors(2, start=1) == (1, 3, 1)


def test_layers_of_a_stage_are_those_of_all_its_ranks_in_their_order() -> None:
    norm = UnitId(kind=UnitKind.FINAL_NORM)
    ranks = [[expert(5, 0), norm], [expert(3, 1), expert(5, 1)], [expert(0, 0, "mtp")]]
    layers, frozen = experts_of_stage(ranks, 2)
    assert layers == [expert(3, 0).layer_name, expert(5, 0).layer_name, "mtp.0"]
    assert frozen == {(layers[0], 0), (layers[2], 1)}


def test_stage_without_experts_has_no_layers() -> None:
    assert experts_of_stage([[UnitId(kind=UnitKind.EMBEDDING)]], 0) == ([], set())
