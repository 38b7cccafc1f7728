"""The dense strategy: everything in full, every time, and its plan."""

import pytest

from moe_ft.errors import ConfigError
from moe_ft.strategies.dense import DENSE
from moe_ft.strategies.interface import Counting
from tests.unit.moe_ft.planning.described import (
    LARGE_OF_8,
    WITHOUT_EXPERTS,
    planned,
    planned_job,
    row,
)
from tests.unit.moe_ft.strategies.stage import CATALOG, build, config_of


def test_all_units_of_the_rank_are_saved() -> None:
    assert tuple(build(DENSE).always) == CATALOG.units


def test_recoveries_are_exact_and_run_nothing_again() -> None:
    assert DENSE.is_exact and not DENSE.replays and not DENSE.leaves_out_frozen
    config = config_of(DENSE)
    assert DENSE.counting(config) is Counting.NOTHING
    assert DENSE.division(config) == ""


def test_snapshots_are_planned_with_their_wait_and_their_memory() -> None:
    text = planned(
        "dense",
        *(*LARGE_OF_8, "--moe-ft-interval", "4"),
        *("--moe-ft-persist-dir", "/x", "--moe-ft-persist-interval", "2"),
        ranks_per_node=4,
        iteration_s=2.0,
        bandwidth=1e9,
        storage_bandwidth=100e6,
    )
    assert "snapshot: 22,403.3 MB in all, 2,800.4 MB of rank 6, which has the most" in text
    assert "copy: 2.800 s" in text
    assert "stall 0.800 s, 10.0% of the time with --moe-ft-interval 4" in text
    assert "persist: 28.004 s; smallest interval 15 iterations; the one planned, 8, is too" in text
    assert row(text, "bytes per parameter, own")[1] == "36.0"
    assert row(text, "bytes per parameter, all")[1] == "60.0"


@pytest.mark.parametrize(("flags", "times"), [((), 3), (("--grad-reduce-in-bf16",), 6)])
def test_peers_that_get_gradients_cost_a_third_or_a_sixth_and_two_buffers(
    flags: tuple[str, ...], times: int
) -> None:
    jobs = [
        planned_job(
            *(*LARGE_OF_8, *flags, "--moe-ft-replicate", what),
            ranks_per_node=4,
            iteration_s=2.0,
            bandwidth=4e9,
            network_bandwidth=20e9,
        )
        for what in ("state", "gradients")
    ]
    state, gradients = (DENSE.plan(job).costs() for job in jobs)
    assert state.peer_bytes / gradients.peer_bytes == pytest.approx(times)
    buffers = 2 * 12 / times * jobs[0].heaviest.num_elements
    assert gradients.host_bytes - state.host_bytes == pytest.approx(buffers)
    assert f"{times}.0 times less than state" in DENSE.plan(jobs[1]).report()


def test_model_without_experts_is_planned() -> None:
    text = planned("dense", *WITHOUT_EXPERTS, world_size=2)
    assert "parameters, no experts" in text
    assert row(text, "bytes per parameter, all")[1] == "24.0"


def test_automatic_interval_is_the_least_that_the_overhead_limit_allows() -> None:
    # 0.8 s of waiting are 3 % of 13.4 iterations of 2 s.
    measured = {"iteration_s": 2.0, "bandwidth": 1e9}
    text = planned("dense", *LARGE_OF_8, "--moe-ft-interval", "auto", **measured)
    assert "with --moe-ft-interval 14" in text
    assert "2.9% of the time" in text


def test_first_rank_has_everything_without_sharding() -> None:
    flags = [word for word in LARGE_OF_8 if word != "--use-distributed-optimizer"]
    text = planned("dense", *flags, "--moe-ft-sharding", "none")
    assert "5,481.5 MB of rank 0" in text


def test_failure_is_planned_where_the_time_between_failures_is_known() -> None:
    text = planned(
        "dense", *LARGE_OF_8, iteration_s=2.0, bandwidth=1e9, mtbf_s=600.0, restart_s=9.0
    )
    assert row(text, "restart")[1:] == ["9.00"]
    assert row(text, "restore")[1:] == ["2,800.4 MB", "2.80"]
    assert row(text, "work to redo")[1:] == ["1.5 iterations", "4.20"]
    assert "a failure every 600 s: 0.6956 of the time is training (ETTR)" in text
    with pytest.raises(ConfigError, match="--mtbf-s=600.0 needs --iteration-s and --bandwidth"):
        planned("dense", *LARGE_OF_8, mtbf_s=600.0)


def test_footprint_has_the_sizes_of_the_plan() -> None:
    flags = (*LARGE_OF_8, "--moe-ft-strategy", "dense")
    footprint = DENSE.plan(planned_job(*flags)).footprint
    text = planned("dense", *LARGE_OF_8)
    assert f"snapshot: {footprint.checkpoint_bytes / 1e6:,.1f} MB in all" in text
    rank_bytes = footprint.share.total_bytes(
        persists=False, replication_factor=0, replica_regions=1
    )
    assert row(text, "a rank, MB")[1] == f"{rank_bytes / 1e6:,.1f}"
    assert footprint.num_stored(2) == 4
