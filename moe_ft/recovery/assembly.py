"""Builds a rank's strategy, and sizes its memory, from flags, job and model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.engine.memory.layout import HEADER_ALIGNMENT_BYTES, FileLayout
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.errors import ConfigError
from moe_ft.format.entries import tensor_bytes
from moe_ft.planning import boundary_log
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.host_memory import index_bytes, num_slots
from moe_ft.planning.sharding import assign_baseline_slices, assign_equal_slices
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.freezing import grouped_layers
from moe_ft.state.gradients import bytes_per_gradient, is_lossy
from moe_ft.state.parameters import AssignSlices
from moe_ft.strategies.interface import RankFacts, Strategy, WindowPlan
from moe_ft.strategies.registry import chosen
from moe_ft.units import Level, UnitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """Bytes of regions, their indexes and a breakpoint, and of the slots of a pool and a boundary log."""

    region_bytes: int
    slot_bytes: int
    num_slots: int
    breakpoint_bytes: int = 0
    boundary_slot_bytes: int = 0
    num_boundary_slots: int = 0
    index_bytes: int = 0
    boundary_index_bytes: int = 0


def slice_assignment(sharding: str) -> AssignSlices:
    """Return who saves which slice at start; adaptive sharding divides again in each snapshot."""
    return assign_baseline_slices if sharding == "none" else assign_equal_slices


def build_strategy(
    config: MoeFtConfig,
    catalog: UnitCatalog,
    experts: ExpertFacts,
    dp_ep_ranks: Sequence[int],
    gather: Callable[[Any, Decoder[Any]], list[Any]],
    rank: int = 0,
) -> Strategy:
    """Return the strategy of a rank. Called by all ranks of a stage; see `RankFacts` for the arguments."""
    trained = [each for each in catalog.parameters if each.optimizer is not None]
    facts = RankFacts(
        rank=rank,
        catalog=catalog,
        experts=experts,
        dp_ep_ranks=dp_ep_ranks,
        grouped_layers=grouped_layers(catalog.parameters),
        replicated_bytes=replicated_bytes(catalog),
        gather=gather,
        gradient_bytes=max(map(bytes_per_gradient, trained), default=2),
    )
    strategy = chosen(config).build(config, facts)
    if strategy.followable and any(map(is_lossy, trained)):  # slots are found by checksums
        raise ConfigError(
            f"{flag_of('replicate')}=gradients that is not exact cannot be used with "
            f"{flag_of('strategy')}={config.strategy.strategy}, whose peers follow some of the experts. "
            f"Use another strategy, or {flag_of('replicate')} state."
        )
    return strategy


def replicated_bytes(catalog: UnitCatalog) -> int:
    """Return the bytes of non-expert parameters that all data-parallel ranks hold, undivided."""
    shared = [each for each in catalog.parameters if not each.is_sharded and not each.is_expert]
    whole = {local.name: (0, local.parameter.numel()) for local in shared}
    return sum(
        tensor_bytes(tensor)
        for unit in catalog.units
        for tensor in catalog.tensors(unit, Level.FULL, whole)
        if tensor.parameter in whole
    )


def lay_out_breakpoint(strategy: Strategy, layouts: UnitLayouts) -> FileLayout:
    """Return the layout of a rank's breakpoint: every unit at FULL, as it is live, nothing packed."""
    plan = strategy.plan_breakpoint()(lambda: None)
    return layouts.lay_out(WindowPlan(snapshots=(plan,)))


def measure_sizes(
    strategy: Strategy,
    layouts: UnitLayouts,
    breakpoint_: FileLayout | None = None,
    traffic: PipelineTraffic | None = None,
    stage: int = 0,
    interval: int = 1,
    num_experts: int = 0,
) -> RankSizes:
    """Return what a rank's memory must hold for any plan of its strategy.

    Args:
        interval: iterations between windows; only a boundary log depends on it.
        num_experts: of an MoE layer.
    """
    plans = strategy.possible_windows()
    sizes = [layouts.lay_out(plan).num_bytes for plan in plans]
    # To fill a region up, its header declares the rest, and may get a page longer for it.
    room = 0 if len(sizes) == 1 else 2 * HEADER_ALIGNMENT_BYTES
    room += int(max(sizes) * strategy.memory_margin)
    units, catalog = strategy.rotation.units, layouts.catalog
    window = max(len(plan.snapshots) for plan in plans)
    num_layers = len({each.layer for each in catalog.units if each.kind is UnitKind.ROUTER})
    num_tensors = sum(len(catalog.tensors(unit, Level.FULL)) for unit in catalog.units)
    return RankSizes(
        region_bytes=max(sizes) + room,
        slot_bytes=max(map(catalog.most_bytes, units), default=0),
        num_slots=num_slots(len(units) + strategy.most_retained, strategy.most_rotating),
        breakpoint_bytes=0 if breakpoint_ is None else breakpoint_.num_bytes,
        boundary_slot_bytes=0 if traffic is None else traffic.slot_bytes(stage),
        num_boundary_slots=0 if traffic is None else boundary_log.num_slots(window, interval),
        boundary_index_bytes=0
        if traffic is None
        else boundary_log.index_bytes(traffic.num_sends(stage)),
        index_bytes=index_bytes(num_tensors, window=window, num_experts=num_experts * num_layers),
    )


def ep_ranks_by_dp(everyone: Sequence[tuple[Any, int, int]], group: Any) -> list[int]:
    """Return ``[data-parallel rank]`` the expert-parallel ranks of one group.

    Of all ranks (group, rank in it, expert-parallel rank) is given.
    """
    members = sorted((dp_rank, ep_rank) for other, dp_rank, ep_rank in everyone if other == group)
    return [ep_rank for _, ep_rank in members]
