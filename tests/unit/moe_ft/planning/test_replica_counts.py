"""Replicas follow the load, and use all slots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.slot_tables import allocate, popular


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Loads of experts, enough slots for them, and a minimum."""
    load = draw(st.lists(st.integers(0, 60), min_size=1, max_size=9))
    return load, draw(st.integers(len(load), 50)), draw(st.integers(1, 6))


def test_allocation_is_that_of_the_equation_in_integers() -> None:
    # 30 slots: 2 * 30 // 31 = 1, 8 * 29 // 29 = 8, 10 * 21 // 21 = 10, and the rest.
    assert allocate([2, 8, 10, 11], 30, 1) == (1, 8, 10, 11)
    # 2 * 30 // 31 is less than 3; 8 * 27 // 29 = 7, 10 * 20 // 21 = 9, and the rest.
    assert allocate([11, 2, 10, 8], 30, 3) == (11, 3, 9, 7)


@given(layers())
def test_replicas_fill_the_slots_and_every_expert_has_the_minimum_that_fits(
    layer: tuple[list[int], int, int],
) -> None:
    load, num_slots, minimum = layer
    counts = allocate(load, num_slots, minimum)
    assert sum(counts) == num_slots
    assert min(counts) >= min(minimum, num_slots // len(load))
    assert sum(popular(load, num_slots)) == num_slots
    assert min(popular(load, num_slots)) >= 1


@given(layers())
def test_experts_with_more_tokens_have_no_fewer_replicas(
    layer: tuple[list[int], int, int],
) -> None:
    load, num_slots, minimum = layer
    for counts in (allocate(load, num_slots, minimum), popular(load, num_slots)):
        by_load = sorted(zip(load, counts, strict=True))
        assert all(
            fewer <= more
            for (low, fewer), (high, more) in zip(by_load, by_load[1:], strict=False)
            if low < high
        )


@given(layers())
def test_popularity_gives_the_counts_nearest_to_the_shares(
    layer: tuple[list[int], int, int],
) -> None:
    load, num_slots, _ = layer
    total = sum(load)
    if total and all(tokens * num_slots >= total for tokens in load):
        exact = [tokens * num_slots / total for tokens in load]
        assert all(
            abs(count - goal) < 1
            for count, goal in zip(popular(load, num_slots), exact, strict=True)
        )


def test_equal_experts_without_tokens_have_equal_replicas() -> None:
    assert allocate([0, 0, 0], 6, 1) == popular([0, 0, 0], 6) == (2, 2, 2)


@pytest.mark.parametrize(
    ("load", "num_slots", "minimum"), [([1, 1, 1], 2, 1), ([], 2, 1), ([1], 2, 0)]
)
def test_allocation_without_a_slot_for_every_expert_is_refused(
    load: list[int], num_slots: int, minimum: int
) -> None:
    with pytest.raises(PlanError):
        allocate(load, num_slots, minimum)
