"""Experts of a stage: their ranks, the interleaved order, and those that are not trained."""

from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.experts import ExpertLayout, experts_of_stage
from moe_ft.units import UnitId, UnitKind


@st.composite
def layouts(draw: st.DrawFn) -> ExpertLayout:
    ep_size = draw(st.integers(1, 6))
    return ExpertLayout(
        num_layers=draw(st.integers(1, 5)),
        num_experts=ep_size * draw(st.integers(1, 6)),
        ep_size=ep_size,
    )


@given(layouts())
def test_each_rank_holds_consecutive_experts_and_equally_many(layout: ExpertLayout) -> None:
    ranks = [layout.rank_of(expert) for expert in range(layout.num_experts)]
    assert ranks == sorted(ranks)
    assert {ranks.count(rank) for rank in range(layout.ep_size)} == {layout.num_local}


@given(layouts())
def test_positions_name_each_expert_once_and_go_around_the_ranks(layout: ExpertLayout) -> None:
    experts = [layout.expert_at(position) for position in range(layout.num_experts)]
    assert sorted(experts) == list(range(layout.num_experts))
    ranks = [layout.rank_of(expert) for expert in experts]
    assert ranks == [position % layout.ep_size for position in range(layout.num_experts)]
    assert layout.expert_at(layout.num_experts) == experts[0]


@given(layouts(), st.integers(1, 6), st.integers(0, 30))
def test_layers_begin_where_the_layer_before_has_taken_its_experts(
    layout: ExpertLayout, k: int, start: int
) -> None:
    cursors = layout.first_cursors(k, start)
    assert len(cursors) == layout.num_layers
    assert cursors[0] == start % layout.num_experts
    for before, after in zip(cursors, cursors[1:], strict=False):
        assert after == (before + k) % layout.num_experts


def expert(layer: int, number: int) -> UnitId:
    return UnitId(kind=UnitKind.EXPERT, layer=layer, expert=number)


def test_stage_has_the_layers_of_all_its_ranks_and_the_experts_that_no_rank_trains() -> None:
    ranks = [
        [expert(3, 0), UnitId(kind=UnitKind.EMBEDDING)],
        [expert(1, 2), expert(1, 0), expert(3, 1)],
    ]
    layers, untrained = experts_of_stage(ranks, 3)
    first, second = expert(1, 0).layer_name, expert(3, 0).layer_name
    assert layers == [first, second]
    assert untrained == {(first, 1), (second, 2)}


def test_stage_without_trained_experts_has_no_layers() -> None:
    assert experts_of_stage([[UnitId(kind=UnitKind.OUTPUT)]], 3) == ([], set())
