"""Links of a rank: stalls and lags by hand, and their bounds."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.job_costs import SnapshotLinks

LINKS = st.builds(
    lambda iteration_s, update_share, **rest: SnapshotLinks(
        iteration_s=iteration_s, hidden_s=iteration_s * (1 - update_share), **rest
    ),
    iteration_s=st.floats(0.1, 10),
    update_share=st.floats(0, 0.9),
    bandwidth=st.floats(1, 1000),
    network_bandwidth=st.floats(1, 1000),
    replication_factor=st.integers(0, 3),
)
SNAPSHOTS = st.lists(st.integers(0, 2000), min_size=1, max_size=6)


def test_budget_is_what_the_slower_of_copy_and_replication_can_move() -> None:
    links = SnapshotLinks(iteration_s=2.0, hidden_s=1.5, bandwidth=100, network_bandwidth=120)
    assert links.budget_bytes == 150
    assert replace(links, replication_factor=1).budget_bytes == 150
    assert replace(links, replication_factor=2).budget_bytes == 120


def test_stall_is_what_the_copy_takes_beyond_forward_and_backward() -> None:
    links = SnapshotLinks(iteration_s=2.0, hidden_s=1.5, bandwidth=100)
    assert links.stalls_s([100, 150, 200, 350]) == pytest.approx([0, 0, 0.5, 2.0])
    assert links.overhead([100, 150, 200, 350]) == pytest.approx(2.5 / 8)


@pytest.mark.parametrize(
    ("snapshots", "factor", "lag"),
    [
        ([50, 50], 1, 0),  # copied at 1.5, sent at 2, when the optimizer steps
        ([80, 80], 1, 1),  # copied at 1.8, sent at 2.6
        ([80, 10], 1, 0),  # copied at 1.1, when the first has 0.5 to go: sent at 1.7
        ([80, 80], 3, 4),  # the first is sent at 3.2, the second at 5.6
        ([80, 80], 0, 0),
        ([150], 0, 0),  # the optimizer waits for the copy
        ([150], 1, 2),  # 1.5 for the copy, for which the optimizer waits, and as long for the peer
    ],
)
def test_lag_is_the_iterations_until_peers_have_the_last_snapshot(
    snapshots: list[int], factor: int, lag: int
) -> None:
    links = SnapshotLinks(
        iteration_s=1.0,
        hidden_s=1.0,
        bandwidth=100,
        network_bandwidth=100,
        replication_factor=factor,
    )
    assert links.lag_iterations(snapshots) == lag


@given(LINKS, SNAPSHOTS)
def test_snapshots_within_the_budget_cost_no_time(
    links: SnapshotLinks, snapshots: list[int]
) -> None:
    fitting = [min(size, math.floor(links.budget_bytes)) for size in snapshots]
    assert max(links.stalls_s(fitting)) == 0
    assert links.overhead(fitting) == 0
    assert links.lag_iterations(fitting) <= 1
