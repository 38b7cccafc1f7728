"""Memory that a start reserves and checks: as much as `plan` says, except for headers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_ft.config.config import (
    MemoryConfig,
    MoeFtConfig,
    StorageConfig,
)
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.errors import ConfigError
from moe_ft.format.entries import ParameterEntry
from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.host_memory import MemoryShare
from moe_ft.planning.model_size import ByteModel, ModelShape, stage_units
from moe_ft.planning.ownership import SavingLayout
from moe_ft.planning.placement import place_replicas
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.recovery.assembly import RankSizes, build_strategy, measure_sizes
from moe_ft.recovery.job_memory import check_memory
from moe_ft.recovery.site import Site
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.size import SavedModel
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.size import position_sizes, region_bytes
from moe_ft.strategies.sparse.strategy import MEMORY_MARGIN
from moe_ft.topology import RankInfo, Topology
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.together import run_together

DP, EP = 4, 2
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    num_experts=8,
    moe_layers=(0, 1),
    moe_ffn_hidden_size=512,
    has_bias=False,
    vocab_size=4096,
    num_positions=0,
)
LAYOUT = SavingLayout(dp=DP, ep=EP, is_optimizer_distributed=False)
(UNITS,) = stage_units(SHAPE, 1)
MODEL = SavedModel(shape=SHAPE, stages=(UNITS,), layout=LAYOUT, byte_model=ByteModel(weights=0))
OPTIMIZER: Any = SimpleNamespace(config=SimpleNamespace(optimizer="adam"))


def sparse_share(window: int) -> MemoryShare:
    sizes = position_sizes(UNITS, LAYOUT, ByteModel(), np.random.default_rng(0))
    return MemoryShare(region_bytes=region_bytes([sizes], window, MEMORY_MARGIN))


CASES: Mapping[str, tuple[PartialConfig | SparseConfig | None, MemoryShare]] = {
    "dense": (None, MemoryShare(region_bytes=SHAPE.num_parameters * 12 // DP)),
    "partial-k1": (PartialConfig(k_snapshot="1"), MODEL.memory_share(1)),
    "partial-auto": (PartialConfig(), MODEL.memory_share(None)),
    "partial-dynamic": (PartialConfig(k_snapshot="1", dynamic_k=True), MODEL.memory_share(None)),
    "sparse-3": (SparseConfig(window="3"), sparse_share(3)),
    "sparse-auto": (SparseConfig(), sparse_share(8)),
}


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
    num_local = SHAPE.num_experts // EP
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
        facts = ExpertFacts(
            num_experts=SHAPE.num_experts,
            ep_rank=rank % EP,
            ep_size=EP,
            tokens_per_sample=1,
            planned_samples=100,
            samples_per_iteration=1,
        )
        catalog = catalog_of(rank)
        ep_ranks = [each % EP for each in range(DP)]
        strategy = build_strategy(config, catalog, facts, ep_ranks, gather, rank)
        return measure_sizes(strategy, UnitLayouts(catalog, rank))

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
            )
            for rank, each in enumerate(sizes)
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_memory_that_is_checked_at_start_is_what_plan_says(name: str, tmp_path: Path) -> None:
    strategy, share = CASES[name]
    topology = topology_of(sizes_of(config_of(strategy)))
    for persists, factor in ((False, 0), (True, 2)):
        expected = share.total_bytes(persists=persists, replication_factor=factor)
        num_files = (3 if persists else 2) + 2 * factor
        for limit, fits in ((expected - 1, False), (expected + num_files * 9 * 4096, True)):
            memory = MemoryConfig(memory_dir=str(tmp_path), host_memory_limit=str(limit))
            storage = StorageConfig(persist_dir="/somewhere" if persists else None)
            site = Site(
                config=replace(config_of(strategy), memory=memory, storage=storage),
                job_id="job",
                node="node0",
                node_dir=tmp_path,
                rank=0,
                topology=topology,
            )
            peers = place_replicas(topology, factor)
            if fits:
                check_memory(site, peers)
            else:
                with pytest.raises(ConfigError, match="--moe-ft-host-memory-limit"):
                    check_memory(site, peers)
