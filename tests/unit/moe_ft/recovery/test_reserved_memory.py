"""Memory that a start reserves and checks: no more than `plan` says."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.fault_tolerance.program.stages import bytes_of
from moe_ft.config.config import MemoryConfig, MoeFtConfig, StorageConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.errors import ConfigError
from moe_ft.format.entries import ParameterEntry
from moe_ft.launches import Launch
from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.host_memory import MemoryShare, regions_at_peers
from moe_ft.planning.placement import place_replicas
from moe_ft.planning.planned_job import (
    MeasuredTimes,
    PlannedJob,
    PlannedModel,
    PlannedRank,
    PlannedStage,
)
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.recovery.assembly import RankSizes, build_strategy, measure_sizes
from moe_ft.recovery.job_memory import check_memory
from moe_ft.recovery.site import Site
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.partial.selection import PartialConfig
from moe_ft.strategies.registry import chosen
from moe_ft.strategies.sparse.strategy import SparseConfig
from moe_ft.topology import RankInfo, Topology
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.builders import make_optimizer
from tests.unit.moe_ft.together import run_together

DP, EP, NUM_EXPERTS = 4, 2, 8
UNITS = {
    UnitId(kind=UnitKind.EMBEDDING): 4096 * 64,
    **{UnitId(kind=UnitKind.NON_EXPERT, layer=layer): 16640 for layer in range(2)},
    **{UnitId(kind=UnitKind.ROUTER, layer=layer): 512 for layer in range(2)},
    **{
        UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert): 65536
        for layer in range(2)
        for expert in range(NUM_EXPERTS)
    },
    UnitId(kind=UnitKind.FINAL_NORM): 128,
}
OPTIMIZER = make_optimizer()
FACTS = ExpertFacts(
    num_experts=NUM_EXPERTS,
    ep_rank=0,
    ep_size=EP,
    tokens_per_sample=1,
    planned_samples=100,
    samples_per_iteration=1,
)
CASES: Mapping[str, PartialConfig | SparseConfig | None] = {
    "dense": None,
    "partial-k1": PartialConfig(k_snapshot="1"),
    "partial-auto": PartialConfig(),
    "partial-dynamic": PartialConfig(k_snapshot="1", dynamic_k=True),
    "sparse-3": SparseConfig(window="3"),
    "sparse-auto": SparseConfig(),
}


def planned_share(strategy: PartialConfig | SparseConfig | None) -> MemoryShare:
    """Return the host memory that plan says."""
    catalogs = [catalog_of(rank) for rank in range(DP)]
    ranks = tuple(
        PlannedRank(
            rank=rank,
            group=0,
            dp_rank=rank,
            ep_rank=rank % EP,
            sizes={unit: bytes_of(unit, catalog, catalog) for unit in catalog.units},
        )
        for rank, catalog in enumerate(catalogs)
    )
    config = config_of(strategy)
    job = PlannedJob(
        model=PlannedModel(
            num_parameters=sum(UNITS.values()), num_experts=NUM_EXPERTS, num_moe_layers=2
        ),
        stages=(PlannedStage(numbers=(0,), ranks=ranks, elements=UNITS),),
        dp=DP,
        ep=EP,
        tp=1,
        expert_tp=1,
        is_optimizer_distributed=False,
        experts=FACTS,
        config=config,
        ranks_per_node=DP,
        replication_factor=0,
        train_iterations=None,
        measured=MeasuredTimes(),
    )
    return chosen(config).plan(job).footprint.share


def config_of(strategy: PartialConfig | SparseConfig | None) -> MoeFtConfig:
    if isinstance(strategy, PartialConfig):
        return MoeFtConfig(
            strategy=StrategyConfig(strategy="partial"), options={"partial": strategy}
        )
    if isinstance(strategy, SparseConfig):
        return MoeFtConfig(strategy=StrategyConfig(strategy="sparse"), options={"sparse": strategy})
    return MoeFtConfig(strategy=StrategyConfig(strategy="dense"))


def catalog_of(rank: int) -> UnitCatalog:
    """Return the units of a data-parallel rank, divided as state/parameters.py does."""
    group, ep_rank = divmod(rank, EP)
    num_local = NUM_EXPERTS // EP
    experts = [
        unit
        for unit in UNITS
        if unit.kind is UnitKind.EXPERT and unit.expert // num_local == ep_rank
    ]
    others = [unit for unit in UNITS if unit.kind is not UnitKind.EXPERT]
    found = []
    for units, place, size in ((others, rank, DP), (experts, group, DP // EP)):
        slices = assign_equal_slices([UNITS[unit] for unit in units], size)[place]
        found += [parameter(unit, each) for unit, each in zip(units, slices, strict=True)]
    return UnitCatalog(found, leaves_out_frozen=True)


def parameter(unit: UnitId, slice_: tuple[int, int]) -> LocalParameter:
    live = torch.nn.Parameter(torch.empty(UNITS[unit], dtype=torch.bfloat16, device="meta"))
    return LocalParameter(
        unit=unit,
        name=f"{unit}.weight",
        entry=ParameterEntry(shape=tuple(live.shape)),
        parameter=live,
        start=slice_[0],
        end=slice_[1],
        optimizer=OPTIMIZER,
        master=live,
        is_sharded=False,
        is_expert=unit.kind is UnitKind.EXPERT,
    )


def sizes_of(config: MoeFtConfig) -> list[RankSizes]:
    """Return what each rank reserves, by the code of a start."""

    def of_rank(rank: int, gather: Any) -> RankSizes:
        facts = replace(FACTS, ep_rank=rank % EP)
        catalog = catalog_of(rank)
        ep_ranks = [each % EP for each in range(DP)]
        strategy = build_strategy(config, catalog, facts, ep_ranks, gather, rank)
        return measure_sizes(strategy, UnitLayouts(catalog, rank), num_experts=NUM_EXPERTS)

    return run_together(DP, of_rank)


def topology_of(sizes: list[RankSizes]) -> Topology:
    """Return the ranks, each on a node of its own."""
    return Topology(
        ranks=tuple(
            RankInfo(
                rank=rank,
                node=f"node{rank}",
                stage=0,
                pid=1,
                address=None,
                region_bytes=each.region_bytes,
                slot_bytes=each.slot_bytes,
                num_slots=each.num_slots,
                index_bytes=each.index_bytes,
            )
            for rank, each in enumerate(sizes)
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_memory_that_is_checked_at_start_is_what_plan_says(name: str, tmp_path: Path) -> None:
    strategy = CASES[name]
    share = planned_share(strategy)
    topology = topology_of(sizes_of(config_of(strategy)))
    for persists, factor in ((False, 0), (True, 2)):
        count: dict[str, Any] = {"persists": persists, "replication_factor": factor}
        count["replica_regions"] = regions_at_peers(MemoryConfig(), factor)
        expected, beside = share.total_bytes(**count), share.beside_bytes(**count)
        for limit, fits in ((expected - beside, False), (expected, True)):
            memory = MemoryConfig(memory_dir=str(tmp_path), host_memory_limit=str(limit))
            storage = StorageConfig(persist_dir="/somewhere" if persists else None)
            site = Site(
                config=replace(config_of(strategy), memory=memory, storage=storage),
                job_id="job",
                node="node0",
                node_dir=tmp_path,
                rank=0,
                topology=topology,
                launch=Launch(),
            )
            peers = place_replicas(topology, factor)
            if fits:
                check_memory(site, peers)
            else:
                with pytest.raises(ConfigError, match="--moe-ft-host-memory-limit"):
                    check_memory(site, peers)
