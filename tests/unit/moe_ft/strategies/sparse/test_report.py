"""The plan of sparse windows, of the model of examples/quickstart.sh."""

import re
from typing import Any

import pytest

from moe_ft.errors import ConfigError
from moe_ft.strategies.sparse.plan import SPARSE
from tests.unit.moe_ft.planning.described import (
    LARGE_OF_8,
    SMALL,
    WITHOUT_EXPERTS,
    planned,
    planned_job,
    row,
)

MEASURED: dict[str, Any] = {"iteration_s": 1.0, "bandwidth": 5e6}
TWO_NODES: dict[str, Any] = {"ranks_per_node": 2, "network_bandwidth": 4.6e6}
WINDOW_3 = ("--moe-ft-window", "3")


def plan_small(*flags: str, world_size: int = 4, **facts: Any) -> str:
    """Return the plan of the small model on four ranks."""
    return planned("sparse", *SMALL, *flags, world_size=world_size, **facts)


def test_snapshots_of_a_given_window_stand_beside_a_dense_one() -> None:
    text = plan_small(*WINDOW_3)
    assert "window: 3, as given" in text
    # What the run logs: 3,705,472, 4,295,296 and 4,538,112 bytes. A rank has 869,696 parameters.
    assert row(text, "first")[1:] == ["3.7", "64.5%"]
    assert row(text, "largest")[1:] == ["4.5", "56.5%"]
    assert row(text, "mean")[1:] == ["4.2", "60.0%"]
    assert row(text, "2")[1:] == ["4.3", "58.8%"]
    assert row(text, "dense")[1:] == ["10.4"]


def test_window_of_more_snapshots_than_units_is_warned_of() -> None:
    warning = r"warning: --moe-ft-window=100000 is more than the (\d+) units .* Give at most \1, or auto\."
    found = re.search(warning, plan_small("--moe-ft-window", "100000"))
    assert found
    assert "warning" not in plan_small("--moe-ft-window", found[1])


def test_window_is_chosen_so_that_its_largest_snapshot_fits_an_iteration() -> None:
    text = plan_small(**MEASURED)
    assert "window: 3, the shortest whose snapshots fit" in text
    assert (
        "budget of a snapshot: 5.0 MB can be copied to the host in an iteration; the largest has 4.5 MB "
        "and fits" in text
    )
    assert "stall 0.000 s, 0.0% of the time with windows of 3" in text


def test_optimizer_step_leaves_less_of_the_iteration_for_copies() -> None:
    text = plan_small(**MEASURED, update_s=0.2)
    assert "window: 4, the shortest whose snapshots fit" in text
    assert "4.0 MB can be copied to the host in an iteration" in text


def test_replication_can_be_what_limits_a_snapshot() -> None:
    text = plan_small(**MEASURED, **TWO_NODES)
    assert "4.6 MB can be sent to 1 peer in an iteration; the largest has 4.5 MB and fits" in text
    assert (
        "last snapshot are complete: 1 iteration after the window: one every 4 iterations" in text
    )


def test_window_that_does_not_fit_has_a_stall_and_an_overhead() -> None:
    text = plan_small("--moe-ft-max-window", "1", **MEASURED)
    assert "window: 1, the longest that is allowed: none fits" in text
    assert "the largest has 10.4 MB and does NOT fit" in text
    # 10,436,352 bytes at 5e6 a second, of which a second is hidden.
    assert "stall 1.087 s, 108.7% of the time with --moe-ft-interval 1" in text


def test_host_memory_is_that_of_own_windows_and_of_replicas() -> None:
    text = plan_small(*WINDOW_3, "--moe-ft-persist-dir", "/x", **TWO_NODES)
    # A window has 12,538,880 bytes, a tenth more is reserved; dense 10,436,352. Three regions and two.
    assert row(text, "a rank's own, MB")[1:] == ["37.6", "41.4", "31.3"]
    assert row(text, "replicas that it keeps (1), MB")[1:] == ["25.1", "27.6", "20.9"]
    assert row(text, "a rank, MB")[1:] == ["67.4", "73.7", "56.9"]
    assert row(text, "a node of 2, at most, MB")[1:] == ["134.9", "147.5", "113.9"]
    assert row(text, "bytes per parameter, own")[1:] == ["43.3", "47.6", "36.0"]
    assert row(text, "bytes per parameter, all")[1:] == ["72.1", "79.3", "60.0"]


def test_memory_is_reserved_for_the_longest_window_that_may_be_chosen() -> None:
    reserved = [
        row(plan_small("--moe-ft-max-window", most, **MEASURED), "a rank's own, MB")[2]
        for most in "38"
    ]
    assert reserved == ["27.6", "36.4"]


def test_recovery_is_listed_part_by_part() -> None:
    text = plan_small(restart_s=20.0, mtbf_s=600.0, **MEASURED)
    assert row(text, "restart")[1:] == ["20.00"]
    assert row(text, "restore")[1:] == ["12.5 MB", "2.51"]
    assert row(text, "conversion")[1:] == ["2 replays", "2.00"]
    assert row(text, "work to redo")[1:] == ["2.5 iterations", "2.50"]
    assert row(text, "E[R]")[1:] == ["27.01"]
    assert "conversion included: 3 to 6, 4.5 on average" in text
    assert "a failure every 600 s: 0.9569 of the time is training (ETTR)" in text


def test_storage_takes_a_window_every_so_many() -> None:
    text = plan_small(
        "--moe-ft-persist-dir",
        "/x",
        "--moe-ft-persist-interval",
        "4",
        storage_bandwidth=1e6,
        **MEASURED,
    )
    # 12.5 s for a window that takes 3 s.
    assert (
        "persist: 12.539 s; smallest interval 5 windows; the one planned, 4, is too short" in text
    )
    assert row(text, "a rank's own, MB")[1] == "37.6"  # three regions


def test_times_are_left_out_without_bandwidths() -> None:
    text = plan_small(*WINDOW_3)
    assert "stall" not in text
    assert "E[R]" not in text


def test_model_without_experts_is_planned_layer_by_layer() -> None:
    text = planned("sparse", *WITHOUT_EXPERTS, *WINDOW_3, world_size=4)
    assert "parameters, no experts" in text
    assert "orders of popularity" not in text


def test_orders_of_popularity_are_drawn_where_experts_have_several_owners() -> None:
    text = plan_small(*WINDOW_3, world_size=8)
    assert "of 4 orders of popularity, drawn at random, the one with the largest snapshot" in text


def test_saving_of_frozen_experts_is_given_with_and_without_grouped_gemm() -> None:
    saving = r"save ([\d.]+) s of the conversion at best, ([\d.]+) s {} grouped GEMM"
    alone = re.search(saving.format("with"), plan_small(*WINDOW_3, **MEASURED))
    text = plan_small(*WINDOW_3, "--moe-grouped-gemm", **MEASURED)
    together = re.search(saving.format("without"), text)
    assert alone and together
    assert alone.groups() == together.groups()[::-1]
    assert 0 < float(together[1]) < float(together[2])
    assert "freeze together, so they are saved together" in text


def test_grouped_gemm_makes_no_difference_with_one_expert_on_a_rank() -> None:
    text = plan_small(
        "--expert-model-parallel-size", "8", world_size=16, ranks_per_node=16, **MEASURED
    )
    assert text.endswith("of the conversion at best")


@pytest.mark.parametrize(
    ("flags", "facts", "message"),
    [
        ((), {}, "--moe-ft-window=auto needs --iteration-s and --bandwidth: .* or a number with"),
        (
            WINDOW_3,
            {"mtbf_s": 600.0},
            "--mtbf-s=600.0 needs --iteration-s and --bandwidth: .* leave",
        ),
        (
            (),
            {**MEASURED, "ranks_per_node": 2},
            "--moe-ft-replication-factor=auto, that is 1, needs --network-bandwidth: .*-factor 0",
        ),
    ],
)
def test_value_that_is_needed_and_missing_is_named(
    flags: tuple[str, ...], facts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_small(*flags, **facts)


def test_footprint_is_what_is_reserved() -> None:
    flags = (*LARGE_OF_8, "--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
    text = planned("sparse", *flags)
    footprint = SPARSE.plan(planned_job(*flags)).footprint
    rank_bytes = footprint.share.total_bytes(
        persists=False, replication_factor=0, replica_regions=1
    )
    assert row(text, "a rank, MB")[2] == f"{rank_bytes / 1e6:,.1f}"
    assert footprint.checkpoint_bytes == 8 * footprint.share.region_bytes
    whole = ("--moe-ft-persist-dir", "/x", "--moe-ft-persist-dense-interval", "9")
    assert (
        SPARSE.plan(planned_job(*flags, *whole)).footprint.num_stored(2)
        == footprint.num_stored(2) + 1
    )
