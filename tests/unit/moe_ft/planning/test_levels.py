"""Levels of groups: every rank is in one, and what goes up reaches the first rank."""

from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.levels import FAN_OUT, divide, most_connections, plan_levels

ranks_of_jobs = st.lists(st.integers(0, 9999), min_size=1, max_size=700, unique=True).map(sorted)


@given(ranks_of_jobs)
def test_values_of_all_ranks_reach_the_top_group(ranks: list[int]) -> None:
    known = {rank: {rank} for rank in ranks}
    levels = plan_levels(ranks)
    for level in levels:
        for group in level:
            everything = set[int]().union(*(known[rank] for rank in group))
            known[group[0]] = everything
    assert known[ranks[0]] == set(ranks)
    assert all(len(level) == 1 for level in levels[-1:])


@given(ranks_of_jobs)
def test_group_is_of_few_ranks_and_led_by_its_first(ranks: list[int]) -> None:
    led: set[int] = set(ranks)
    for level in plan_levels(ranks):
        for group in level:
            assert 2 <= len(group) <= FAN_OUT
            assert set(group) <= led and list(group) == sorted(group)
            led -= set(group[1:])


def test_ranks_of_nine_are_a_block_and_one_that_meets_its_leader() -> None:
    assert plan_levels(range(9)) == [[(0, 1, 2, 3, 4, 5, 6, 7)], [(0, 8)]]


def test_connections_of_a_rank_grow_with_the_levels_alone() -> None:
    assert [most_connections(size) for size in (1, 8, 64, 512, 4096)] == [0, 7, 14, 21, 28]


@given(st.integers(1, 700))
def test_values_that_are_divided_level_by_level_come_to_their_ranks(num_ranks: int) -> None:
    parts = {0: {rank: str(rank) for rank in range(num_ranks)}}
    for level in reversed(plan_levels(range(num_ranks))):
        for members in level:
            parts.update(zip(members, divide(parts[members[0]], members), strict=True))
    assert parts == {rank: {rank: str(rank)} for rank in range(num_ranks)}
