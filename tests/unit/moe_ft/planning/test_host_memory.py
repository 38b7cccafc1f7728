"""Host memory, and the smallest interval that satisfies both bounds."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.config.config import MemoryConfig
from moe_ft.planning.host_memory import MemoryShare, num_regions, num_slots, regions_at_peers
from moe_ft.planning.interval import CheckpointCost, choose_interval


def test_regions_are_as_many_as_their_uses() -> None:
    assert (num_regions(persists=False), num_regions(persists=True)) == (2, 3)


def test_pool_has_slots_for_the_newest_versions_a_snapshot_and_what_is_written() -> None:
    assert num_slots(8, 2) == 12


@pytest.mark.parametrize(
    ("persists", "factor", "flag", "total"),
    # 12 bytes of a parameter in each region: two, or three with storage; two for one replica, and one or two
    # for each of two.
    [
        (False, 0, "1", 24),
        (True, 0, "1", 36),
        (False, 1, "1", 48),
        (True, 1, "1", 60),
        (False, 2, "1", 48),
        (True, 2, "1", 60),
        (False, 2, "2", 72),
        (True, 2, "2", 84),
    ],
)
def test_dense_checkpoints_take_24_to_84_bytes_of_a_parameter(
    persists: bool, factor: int, flag: str, total: int
) -> None:
    share = MemoryShare(region_bytes=12)
    regions = regions_at_peers(MemoryConfig(replica_regions=flag), factor)
    found = share.total_bytes(persists=persists, replication_factor=factor, replica_regions=regions)
    assert found == total


def test_replicas_by_gradients_have_two_regions() -> None:
    assert regions_at_peers(MemoryConfig(replicate="gradients"), 2) == 2


@pytest.mark.parametrize(
    ("pool_bytes", "regions", "covered"), [(0, 1, [1, 1, 2]), (0, 2, [2, 3, 4]), (9, 1, [2, 3, 4])]
)
def test_half_of_the_peers_cover_losses_while_the_other_half_is_sent_to(
    pool_bytes: int, regions: int, covered: list[int]
) -> None:
    share = MemoryShare(region_bytes=12, pool_bytes=pool_bytes)
    assert [share.num_covered(factor, regions) for factor in (2, 3, 4)] == covered


def test_breakpoint_is_a_part_of_what_a_rank_keeps_and_of_no_replica() -> None:
    share = MemoryShare(region_bytes=10, pool_bytes=7, breakpoint_bytes=5)
    assert share.own_bytes(persists=False) == 32
    assert share.replica_bytes(1) == 27  # with a pool, two regions are kept
    assert share.total_bytes(persists=False, replication_factor=1, replica_regions=1) == 59


def test_boundary_log_is_the_ranks_own() -> None:
    share = MemoryShare(region_bytes=10, boundary_bytes=5)
    assert share.own_bytes(persists=False) == 25
    assert share.replica_bytes(2) == 20


# Division in floating point may turn a bound that is met exactly into one that is missed by a bit.
ROUNDING = Fraction(1, 10**9)
SECONDS = st.floats(0, 1e5, allow_nan=False)
POSITIVE_SECONDS = st.floats(1e-4, 1e4)
LIMITS = st.floats(1e-4, 0.99)


@st.composite
def costs(draw: st.DrawFn) -> CheckpointCost:
    return CheckpointCost(
        iteration_s=draw(POSITIVE_SECONDS), overhead_s=draw(SECONDS), completion_s=draw(SECONDS)
    )


def satisfies(cost: CheckpointCost, limit: float, interval: int, slack: Fraction) -> bool:
    time_s = interval * Fraction(cost.iteration_s) * (1 + slack)
    return (
        Fraction(cost.overhead_s) <= Fraction(limit) * time_s
        and Fraction(cost.completion_s) <= time_s
    )


@given(costs(), LIMITS)
def test_interval_of_any_cost_satisfies_both_bounds(cost: CheckpointCost, limit: float) -> None:
    assert satisfies(cost, limit, choose_interval(cost, limit), ROUNDING)


@given(costs(), LIMITS)
def test_interval_of_any_cost_could_not_be_one_shorter(cost: CheckpointCost, limit: float) -> None:
    interval = choose_interval(cost, limit)
    assert interval == 1 or not satisfies(cost, limit, interval - 1, -ROUNDING)


def test_overhead_that_binds_gives_the_interval_worked_by_hand() -> None:
    cost = CheckpointCost(iteration_s=0.5, overhead_s=0.125, completion_s=1.0)
    # 0.125 / (0.0625 x 0.5) = 4 iterations for the overhead, 1.0 / 0.5 = 2 for completion
    assert choose_interval(cost, 0.0625) == 4
