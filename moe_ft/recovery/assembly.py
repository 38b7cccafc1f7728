"""Makes a rank's strategy, and the sizes of its memory, from flags, job and model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.layout import HEADER_ALIGNMENT_BYTES
from moe_ft.engine.unit_layouts import UnitLayouts
from moe_ft.format.entries import tensor_bytes
from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.host_memory import num_slots
from moe_ft.planning.sharding import assign_baseline_slices, assign_equal_slices
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.freezing import grouped_layers
from moe_ft.state.parameters import AssignSlices, GroupPlace
from moe_ft.strategies.interface import DenseStrategy, Strategy
from moe_ft.strategies.partial.strategy import (
    PartialSettings,
    PartialStrategy,
    RankShare,
    divide_units,
)
from moe_ft.strategies.sparse.positions import RankUnits
from moe_ft.strategies.sparse.strategy import SparseSettings, SparseStrategy
from moe_ft.units import Level, UnitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFacts:
    """What the training loop tells about experts and tokens.

    Attributes:
        num_experts: per MoE layer, over all ranks; 0 for a model without experts.
        ep: this rank's place among the expert-parallel ranks.
        tokens_per_sample: sequence length times top-k.
        planned_samples: of the whole planned run.
        samples_per_iteration: of that run, on average.
    """

    num_experts: int
    ep: GroupPlace
    tokens_per_sample: int
    planned_samples: int
    samples_per_iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """Bytes of a region, and bytes and number of a pool's slots."""

    region_bytes: int
    slot_bytes: int
    num_slots: int


def slice_assignment(sharding: str) -> AssignSlices:
    """Return who saves which slice at start; adaptive sharding divides anew in each snapshot."""
    return assign_baseline_slices if sharding == "none" else assign_equal_slices


def division_of(config: MoeFtConfig) -> str:
    """Return how experts are divided among snapshots and ranks; empty where they are not."""
    if config.strategy.strategy != "partial":
        return ""
    partial = config.partial
    flags = [f"--moe-ft-partial-covers {partial.partial_covers}"]
    flags += ["--moe-ft-master-always-full"] * partial.master_always_full
    flags += ["--moe-ft-sharding none"] * (config.strategy.sharding == "none")
    return " ".join(flags)


def build_strategy(
    config: MoeFtConfig,
    catalog: UnitCatalog,
    experts: ExpertFacts,
    dp_ep_ranks: Sequence[int],
    gather: Callable[[Any], list[Any]],
    rank: int = 0,
) -> Strategy:
    """Return the strategy of a rank. Called by all ranks of a stage.

    Args:
        config: the flags.
        catalog: the rank's units.
        experts: of the job.
        dp_ep_ranks: ``[data-parallel rank]`` which expert-parallel rank it is.
        gather: exchanges values within the stage.
        rank: this one, global.
    """
    if config.strategy.strategy == "dense":
        return DenseStrategy(catalog.units)
    if config.strategy.strategy == "sparse":
        return _build_sparse(config, catalog, experts, gather, rank)
    partial, num_experts = config.partial, experts.num_experts
    always, rotating = divide_units(
        catalog.units, partial.partial_covers, master_always_full=partial.master_always_full
    )
    layers, frozen = _experts_of_stage(catalog, num_experts, gather)
    layout = ExpertLayout(num_layers=len(layers), num_experts=num_experts, ep_size=experts.ep.size)
    settings = PartialSettings(
        k_snapshot=partial.k_in_memory,
        k_persist=partial.k_persist,
        is_load_aware=partial.selection == "load-aware",
        raises_k=partial.dynamic_k,
        plt_limit=partial.plt_limit,
        interval=config.strategy.interval_iterations,
        planned_tokens=experts.planned_samples * experts.tokens_per_sample,
        tokens_per_iteration=experts.samples_per_iteration * experts.tokens_per_sample,
    )
    own = [unit for unit in rotating if catalog.owns(unit)]
    share = RankShare(
        always_bytes=sum(map(catalog.num_bytes, always)),
        unit_bytes=max(gather(max(map(catalog.num_bytes, own), default=0))),
        replicated_bytes=_replicated_bytes(catalog) * (config.strategy.sharding == "adaptive"),
        ep_ranks=tuple(dp_ep_ranks),
    )
    return PartialStrategy(always, own, layers, layout, settings, share, frozen)


def _build_sparse(
    config: MoeFtConfig,
    catalog: UnitCatalog,
    experts: ExpertFacts,
    gather: Callable[[Any], list[Any]],
    rank: int,
) -> SparseStrategy:
    sizes = {
        unit: (
            catalog.num_bytes(unit, alignment=ALIGNMENT_BYTES),
            catalog.num_bytes(unit, Level.COMPUTE, alignment=ALIGNMENT_BYTES),
        )
        for unit in catalog.units
    }
    own_units = RankUnits(
        ep_rank=experts.ep.rank, sizes=sizes, grouped_layers=grouped_layers(catalog.parameters)
    )
    everyone = gather((rank, own_units))
    layers, _ = _experts_of_stage(catalog, experts.num_experts, gather)
    sparse = config.sparse
    settings = SparseSettings(
        window=sparse.window_snapshots,
        longest=sparse.max_window,
        measure=sparse.unit_order,
        decay=sparse.popularity_decay,
        change=sparse.reorder_change,
        fraction=sparse.reorder_fraction,
    )
    own = [member for member, _ in everyone].index(rank)
    return SparseStrategy(own, [units for _, units in everyone], layers, settings)


def _experts_of_stage(
    catalog: UnitCatalog, num_experts: int, gather: Callable[[Any], list[Any]]
) -> tuple[list[str], set[tuple[str, int]]]:
    """Return the layers of a stage in which some experts are trained, and the experts that are not."""
    own = [unit for unit in catalog.units if unit.kind is UnitKind.EXPERT]
    trained = {unit for units in gather(own) for unit in units}
    layers = list(
        dict.fromkeys(
            unit.layer_name for unit in sorted(trained, key=lambda each: (each.block, each.layer))
        )
    )
    known = {(unit.layer_name, unit.expert) for unit in trained}
    everyone = {(layer, expert) for layer in layers for expert in range(num_experts)}
    return layers, everyone - known


def _replicated_bytes(catalog: UnitCatalog) -> int:
    """Return the bytes of non-expert parameters that data-parallel ranks hold alike, undivided."""
    shared = [each for each in catalog.parameters if not each.is_sharded and not each.is_expert]
    whole = {local.name: (0, local.parameter.numel()) for local in shared}
    return sum(
        tensor_bytes(tensor)
        for unit in catalog.units
        for tensor in catalog.tensors(unit, Level.FULL, whole)
        if tensor.parameter in whole
    )


def measure_sizes(strategy: Strategy, layouts: UnitLayouts) -> RankSizes:
    """Return what a rank's memory must hold for any plan of its strategy."""
    sizes = [layouts.lay_out(plan).num_bytes for plan in strategy.possible_windows()]
    # To fill a region up, its header declares the rest, and may get a page longer for it.
    room = 0 if len(sizes) == 1 else 2 * HEADER_ALIGNMENT_BYTES
    room += int(max(sizes) * strategy.memory_margin)
    units = strategy.rotating
    return RankSizes(
        region_bytes=max(sizes) + room,
        slot_bytes=max(map(layouts.most_bytes, units), default=0),
        num_slots=num_slots(len(units), strategy.most_rotating),
    )


def ep_ranks_by_dp(everyone: Sequence[tuple[Any, int, int]], group: Any) -> list[int]:
    """Return ``[data-parallel rank]`` the expert-parallel ranks of one group.

    Args:
        everyone: of all ranks (group, rank in it, expert-parallel rank).
        group: of this rank.
    """
    members = sorted((dp_rank, ep_rank) for other, dp_rank, ep_rank in everyone if other == group)
    return [ep_rank for _, ep_rank in members]
