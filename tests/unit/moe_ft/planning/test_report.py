"""Lines and tables that the plans of several strategies have."""

from typing import Any

import pytest

from moe_ft.errors import ConfigError
from moe_ft.planning.host_memory import Footprint, MemoryShare
from moe_ft.planning.interval import smallest_interval
from moe_ft.planning.job_costs import Sizes
from moe_ft.planning.report import (
    StrategyPlan,
    boundary_line,
    describe_model,
    describe_ranks,
    slot_lines,
)
from moe_ft.planning.spares import live_replica_lines
from tests.unit.moe_ft.planning.described import LARGE, LARGE_OF_8, planned_job, row

STORED = ("--moe-ft-persist-dir", "/x")


class Given(StrategyPlan):
    """A plan of 3 GB in each snapshot, and regions and pools of so many bytes."""

    @property
    def sizes(self) -> Sizes:
        num_bytes, interval = 3 * 10**9, self.job.config.strategy.interval_iterations or 1
        return Sizes(
            snapshots=(num_bytes,),
            interval=interval,
            persisted_bytes=num_bytes,
            whole_bytes=num_bytes,
            read_bytes=num_bytes,
        )

    @property
    def footprint(self) -> Footprint:
        share = MemoryShare(region_bytes=10**7, pool_bytes=10**6)
        return Footprint(share=share, checkpoint_bytes=0)


def lines_of(*flags: str, **facts: Any) -> str:
    return Given(planned_job(*LARGE, *flags, **facts), "column").report()


def test_llama_like_model_has_the_parameters_of_its_shape() -> None:
    # Mixtral 8x7B: 46.70e9 parameters.
    model = planned_job(
        *("--num-layers", "32", "--hidden-size", "4096", "--num-experts", "8", "--swiglu"),
        *("--ffn-hidden-size", "14336", "--num-attention-heads", "32", "--group-query-attention"),
        *("--num-query-groups", "8", "--vocab-size", "32000", "--position-embedding-type", "rope"),
        *("--normalization", "RMSNorm", "--disable-bias-linear"),
        "--untie-embeddings-and-output-weights",
    ).model
    assert describe_model(model).startswith("46.703e9 parameters, of which 45.097e9 in 8 experts")


def test_slots_cost_memory_and_messages_and_replicas_in_them_survive_nothing() -> None:
    own = (*LARGE, "--disable-bias-linear", "--transformer-impl", "local")
    nodes = {"world_size": 8, "ranks_per_node": 4}
    job = planned_job(*own, "--moe-ft-expert-slots", "4", **nodes)
    stock = planned_job(*own, "--expert-model-parallel-size", "8", **nodes)
    assert "each rank holds 1/8 of the state of every expert;" in describe_ranks(job)
    expert, num_layers = 2 * 1024 * 4096, 12
    slots = num_layers * 4 * expert
    assert job.state_bytes == stock.state_bytes + 6 * slots
    first, ratios, costs = slot_lines(job)
    assert first.startswith("4 slots on each of 8 ranks of a stage, for 16 experts of a layer")
    assert row(ratios, "1:1") == ["1:1", "1.00", "1.00"]
    _, once, several = row(ratios, "8:1")
    assert 1 < float(several) < 1.3 < float(once)
    assert f"{6 * slots / 1e6:,.1f} MB of weights and gradients in slots" in costs
    gradients, weights = (each * slots * 7 // 8 / 1e6 for each in (4, 2))
    assert f"sends {gradients:,.1f} MB of gradients and {weights:,.1f} MB of weights" in costs
    (lost,) = live_replica_lines(job)
    assert "by live replicas none, as every rank has a part" in lost
    assert "which places equally popular ones so, 100% of 1" in lost
    assert slot_lines(stock) == []


def test_holders_of_an_expert_are_named() -> None:
    text = describe_ranks(planned_job(*LARGE_OF_8, world_size=16))
    assert "pp 1, dp 16, ep 8: 2 ranks hold each expert; each rank saves its slices" in text
    replicated = [word for word in LARGE if word != "--use-distributed-optimizer"]
    text = describe_ranks(planned_job(*replicated, "--moe-ft-sharding", "none"))
    assert "8 ranks hold each expert; optimizer on every rank, sharding none; 12 bytes" in text


def test_memory_grows_with_storage_and_replicas() -> None:
    alone = lines_of(world_size=4)
    assert row(alone, "a rank's own, MB")[1] == "21.0"
    assert row(alone, "a node of 4, at most, MB")[1] == "84.0"
    kept = lines_of(*STORED, world_size=16, ranks_per_node=2)
    assert row(kept, "a rank's own, MB")[1] == "31.0"
    assert row(kept, "replicas that it keeps (2), MB")[1] == "42.0"
    assert row(kept, "a rank, MB")[1] == "73.0"


@pytest.mark.parametrize(("planned", "verdict"), [(3, "is enough"), (2, "is too short")])
def test_line_on_storage_says_whether_writes_keep_up(planned: int, verdict: str) -> None:
    flags = (*STORED, "--moe-ft-interval", f"{planned}", "--moe-ft-persist-interval", "1")
    text = lines_of(*flags, iteration_s=1.0, storage_bandwidth=1e9)
    assert "persist: 3.000 s; smallest interval 3 iterations" in text
    assert f"{planned}, {verdict}" in text


def test_line_on_storage_needs_a_bandwidth() -> None:
    assert "persist:" not in lines_of(*STORED)


@pytest.mark.parametrize(("num_bytes", "interval"), [(0, 1), (100, 1), (101, 2), (1000, 10)])
def test_smallest_interval_covers_the_persist(num_bytes: int, interval: int) -> None:
    assert smallest_interval(num_bytes, bandwidth_bytes_per_s=50.0, iteration_s=2.0) == interval


def test_line_on_whole_states_says_what_one_costs() -> None:
    flags = (*STORED, "--moe-ft-persist-interval", "0")
    speeds: dict[str, Any] = {"iteration_s": 1.0, "bandwidth": 1e9, "storage_bandwidth": 1e9}
    text = lines_of(*flags, "--moe-ft-persist-dense-interval", "500", **speeds)
    assert "whole state on storage every 500 iterations: 3,000.0 MB of the rank" in text
    assert "stall 2.000 s; written in 3.000 s" in text
    assert "persist:" not in text
    assert "whole state" not in lines_of(*STORED)


def test_line_on_the_boundary_log_says_what_it_takes() -> None:
    flags = ("--seq-length", "1024", "--micro-batch-size", "2", "--global-batch-size", "64")
    job = planned_job(
        *(*LARGE, *flags, "--pipeline-model-parallel-size", "4", "--moe-ft-strategy", "dense"),
        "--moe-ft-upstream-log",
        world_size=8,
    )
    # 16 micro-batches of 4 MiB in both directions; windows of one snapshot need four iterations.
    (line,) = boundary_line(job, 1)
    assert line.startswith(
        "boundary log: 134.2 MB of an iteration in 32 tensors, 4 iterations, 537.1 MB of the rank with"
    )
    assert boundary_line(planned_job(*LARGE), 1) == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--pipeline-model-parallel-size", "1"), "--moe-ft-upstream-log needs pipeline stages"),
        (("--pipeline-model-parallel-size", "2"), "--seq-length, --micro-batch-size not given"),
    ],
)
def test_boundary_log_that_cannot_be_planned_is_refused(
    flags: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        planned_job(*LARGE, *flags, "--moe-ft-strategy", "dense", "--moe-ft-upstream-log")
