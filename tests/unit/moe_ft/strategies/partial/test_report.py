"""The plan of partial experts; its numbers are those of the models in MoC-System, Table 1."""

import pytest

from moe_ft.errors import ConfigError
from moe_ft.strategies.partial.plan import PARTIAL
from tests.unit.moe_ft.planning.described import LARGE, LARGE_OF_8, planned, planned_job, row

IN_FULL = (
    *(*LARGE_OF_8, "--moe-ft-k-snapshot", "4", "--moe-ft-k-persist", "1"),
    "--moe-ft-master-always-full",
)
REPLICATED = tuple(word for word in IN_FULL if word != "--use-distributed-optimizer")
K_1 = ("--moe-ft-k-snapshot", "1")


def test_sizes_at_both_levels_stand_beside_full() -> None:
    # 255.3e6 parameters are no experts', with 12 bytes; 1,611.6e6 are, with 4 and, of k in 16, 8.
    text = planned("partial", *IN_FULL)
    assert "12 bytes of a parameter saved" in text
    assert row(text, "snapshot")[1:6] == ["4", "12,733.7", "56.8%", "1,591.7", "6"]
    assert row(text, "persist")[1:5] == ["1", "10,316.3", "46.0%", "1,323.1"]
    assert row(text, "persist")[6:] == ["1.03", "52.8%"]
    assert row(text, "full")[4:7] == ["2,800.4", "6", "1.00"]
    assert "sharding" not in text


def test_baseline_stands_beside_a_sharding_that_has_an_effect() -> None:
    assert row(planned("partial", *REPLICATED), "full, sharding none")[4] == "5,481.5"


def test_experts_that_are_not_selected_are_left_out() -> None:
    assert row(planned("partial", *LARGE_OF_8, *K_1), "snapshot")[3] == "19.1%"


def test_master_weights_are_always_saved_if_asked_for() -> None:
    text = planned("partial", *LARGE_OF_8, *K_1, "--moe-ft-master-always-full")
    assert row(text, "snapshot")[3] == "46.0%"  # 1/16 of 8 of the 12 bytes


def test_adaptive_sharding_lightens_the_bottleneck_and_is_advised() -> None:
    advice = "persist: --moe-ft-sharding adaptive makes the heaviest rank 2.5% lighter"
    text = planned("partial", *REPLICATED, "--moe-ft-sharding", "adaptive")
    assert row(text, "persist")[4:7] == ["1,289.5", "1", "1.00"]
    assert advice not in text
    assert advice in planned("partial", *REPLICATED)
    assert "snapshot: --moe-ft-sharding adaptive" not in planned("partial", *REPLICATED)


def test_heaviest_rank_has_most_of_an_expert_that_many_share() -> None:
    text = planned("partial", *LARGE_OF_8, *K_1, world_size=128)
    assert (
        row(text, "snapshot")[6] == "3.73"
    )  # (255.3e6 / 128 + 8.4e6) of (255.3e6 + 100.7e6) / 128
    even = planned(
        "partial",
        *(*LARGE_OF_8, *K_1, "--overlap-grad-reduce", "--ddp-bucket-size", "1000000"),
        world_size=128,
    )
    assert float(row(even, "snapshot")[6]) < 1.1


def test_stages_are_planned_rank_by_rank() -> None:
    text = planned("partial", *IN_FULL, "--pipeline-model-parallel-size", "2", world_size=16)
    assert "pp 2, dp 8, ep 8" in text
    assert row(text, "15")
    # The first stage has the positions as well; both have the words.
    assert row(text, "0")[1] > row(text, "8")[1]


def test_every_rank_is_listed_where_they_are_few() -> None:
    text = planned("partial", *REPLICATED, "--moe-ft-sharding", "none")
    assert row(text, "0")[4] == "4,004.2"
    assert row(text, "7")[2] == "1,208.7"


def test_spread_over_ranks_is_printed_where_they_are_many() -> None:
    text = planned("partial", *LARGE_OF_8, *K_1, world_size=32)
    least, mean, most = (
        float(row(text, name)[2].replace(",", "")) for name in ("least", "mean", "most")
    )
    assert least <= mean <= most
    assert float(row(text, "snapshot")[4].replace(",", "")) == most


def test_host_memory_of_partial_experts_has_slots_for_three_versions() -> None:
    text = planned("partial", *LARGE_OF_8, *K_1, "--moe-ft-persist-dir", "/x", ranks_per_node=4)
    # Per rank 31.9e6 parameters of no expert and 201.4e6 of 24 experts, whose slots have 12.375 bytes.
    # k 1: 24 + 2 * 12 slots, k auto: 3 * 24.
    assert row(text, "a rank's own, MB")[1:] == ["6,134.9", "8,627.9", "8,401.2"]
    assert row(text, "replicas that it keeps (1), MB")[1:] == ["5,751.9", "8,244.8", "5,600.8"]
    assert row(text, "a node of 4, at most, MB")[1:] == ["47,573.2", "67,516.7", "56,034.1"]
    assert row(text, "bytes per parameter, all")[1:] == ["50.9", "72.3", "60.0"]


def test_bandwidths_give_what_stays_hidden_and_the_smallest_interval() -> None:
    text = planned(
        "partial",
        *(*IN_FULL, "--moe-ft-interval", "5"),
        *("--moe-ft-persist-dir", "/x", "--moe-ft-persist-interval", "1"),
        iteration_s=2.0,
        update_s=0.1,
        bandwidth=1e9,
        storage_bandwidth=100e6,
    )
    # Bottlenecks: k = 6 has 1,793.1 MB, k = 7 1,927.4 MB, more than 1.9 s; persist 1,323.1 MB, 13.2 s.
    assert "copy: 1.592 s, alongside 1.900 s of forward and backward; stall 0.000 s" in text
    assert "largest k-snapshot that stays hidden: 6" in text
    assert "auto takes" not in text
    assert (
        "persist: 13.231 s; smallest interval 7 iterations; the one planned, 5, is too short"
        in (text)
    )


def test_automatic_k_is_named_where_it_is_more_careful() -> None:
    measured = {"iteration_s": 0.5, "bandwidth": 2e9}
    text = planned("partial", *LARGE_OF_8, *K_1, world_size=16, **measured)
    assert "largest k-snapshot that stays hidden: 10" in text
    assert "auto takes 5: it allows for one rank having every selected expert" in text


def test_snapshot_that_cannot_be_hidden_has_a_stall() -> None:
    text = planned("partial", *IN_FULL, iteration_s=0.592, bandwidth=1e9)
    assert "stall 1.000 s" in text
    assert "largest k-snapshot that stays hidden: none, not even 1" in text


def test_losses_of_a_fault_are_those_of_the_closed_form() -> None:
    text = planned(
        "partial",
        *(*LARGE, "--num-experts", "8", "--train-iters", "1280", "--moe-ft-k-snapshot", "4"),
        *("--moe-ft-k-persist", "2", "--moe-ft-interval", "16", "--moe-ft-persist-interval", "2"),
    )
    assert row(text, "memory or peers")[1:] == ["8.00", "0.6250%"]
    assert row(text, "storage (all nodes lost)")[1:] == ["48.00", "3.7500%"]


def test_automatic_k_is_the_one_that_is_planned() -> None:
    measured = {"iteration_s": 0.5, "bandwidth": 2e9}
    text = planned("partial", *LARGE_OF_8, world_size=16, **measured)
    assert row(text, "snapshot")[1] == "5"
    assert row(text, "persist")[1] == "1"


def test_automatic_k_needs_bandwidths() -> None:
    with pytest.raises(ConfigError, match="--moe-ft-k-snapshot=auto needs .* or plan with 1 to 16"):
        planned("partial", *LARGE_OF_8)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--moe-grouped-gemm",), "grouped GEMM: slices are planned as if"),
        (("--moe-ft-selection", "load-aware"), "selection load-aware: planned as if"),
    ],
)
def test_setting_that_is_planned_as_another_is_named(flags: tuple[str, ...], line: str) -> None:
    assert line in planned("partial", *IN_FULL, *flags)


def test_footprint_has_the_sizes_of_the_plan_and_of_older_files() -> None:
    flags = (*LARGE_OF_8, "--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "4")
    text = planned("partial", *flags)
    footprint = PARTIAL.plan(planned_job(*flags, "--moe-ft-k-persist", "3")).footprint
    rank_bytes = footprint.share.total_bytes(
        persists=False, replication_factor=0, replica_regions=1
    )
    assert row(text, "a rank, MB")[1] == f"{rank_bytes / 1e6:,.1f}"
    assert footprint.num_stored(2) == 4 + 5  # sixteen experts, three in each
    whole = ("--moe-ft-persist-dir", "/x", "--moe-ft-persist-dense-interval", "9")
    assert PARTIAL.plan(planned_job(*flags, *whole)).footprint.num_stored(2) == 4 + 15 + 1
    smallest = PARTIAL.plan(planned_job(*flags)).footprint
    assert row(text, "persist")[2] == f"{smallest.checkpoint_bytes / 1e6:,.1f}"


def test_footprint_of_automatic_k_has_room_for_all_experts() -> None:
    flags = (*LARGE_OF_8, "--moe-ft-strategy", "partial", "--moe-ft-k-snapshot")
    auto = PARTIAL.plan(planned_job(*flags, "auto")).footprint
    assert auto == PARTIAL.plan(planned_job(*flags, "1", "--moe-ft-dynamic-k")).footprint
    assert auto.share.pool_bytes > PARTIAL.plan(planned_job(*flags, "1")).footprint.share.pool_bytes
