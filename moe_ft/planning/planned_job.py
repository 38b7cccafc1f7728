"""The job that `python -m moe_ft plan` plans: its ranks and units, settings, and what was measured.

megatron/fault_tolerance/program/plan.py builds it from a command line.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moe_ft.arithmetic import round_up
from moe_ft.command_lines import as_flag
from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.boundary_log import PipelineTraffic, most_log_bytes
from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.host_memory import Regions, index_bytes, regions_at_peers
from moe_ft.planning.interval import CheckpointCost, choose_interval
from moe_ft.planning.placement import planned_replicas
from moe_ft.units import Level, UnitId, UnitKind, UnitPart

# Of a parameter, for estimates: 16-bit weights with their gradients, and the optimizer's state.
WEIGHT_BYTES, OPTIMIZER_BYTES = 6, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTimes:
    """Times and bandwidths that no flag of training gives; None for unknown ones.

    Attributes:
        update_s: its optimizer step, during which no state can be copied.
        bandwidth: from device to host, bytes per second and rank.
        restart_s: from a failure until all processes run again.
        keep_s: from a failure until a kept process has forked all ranks again.
        repair_s: from a failure until a replacement of the dead processes is one of the group.
    """

    iteration_s: float | None = None
    update_s: float = 0.0
    bandwidth: float | None = None
    network_bandwidth: float | None = None
    storage_bandwidth: float | None = None
    mtbf_s: float | None = None
    restart_s: float = 0.0
    keep_s: float | None = None
    repair_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("iteration_s", "mtbf_s", "restart_s", "keep_s", "repair_s", "update_s"):
            value = getattr(self, name)
            must_pass = name in ("iteration_s", "mtbf_s")
            if value is not None and not (0 <= value < math.inf and (value or not must_pass)):
                rule = "more than 0 seconds" if must_pass else "at least 0 seconds"
                raise ConfigError(f"{as_flag(name)}={value} must be {rule}. Give a measured value.")
        if self.iteration_s is not None and self.update_s >= self.iteration_s:
            raise ConfigError(
                f"--update-s={self.update_s} must be less than --iteration-s={self.iteration_s}, which "
                "includes it. Lower it."
            )
        for name in ("bandwidth", "storage_bandwidth"):
            if getattr(self, name) is not None and self.iteration_s is None:
                flag = as_flag(name)
                raise ConfigError(
                    f"{flag}={getattr(self, name):g} needs --iteration-s: the time of a copy is compared "
                    f"with an iteration. Give it, or leave {flag} out."
                )

    @property
    def hidden_s(self) -> float:
        """Forward and backward pass of an iteration, during which state can be copied."""
        return (self.iteration_s or 0.0) - self.update_s

    @property
    def budget_bytes(self) -> float | None:
        """Bytes that a rank can copy during forward and backward; None if that is not known."""
        return None if self.bandwidth is None else self.bandwidth * self.hidden_s


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """Bytes of a version of a unit on a rank, as it lies in a snapshot; 0 where other ranks save all.

    Attributes:
        full, compute: by level.
        weights, moments: of its two parts, at FULL.
        live: of its tensors as the optimizer keeps them, whatever format snapshots have.
        slot, moments_slot: that a version of it, or of its moments, may take, whatever format another start
            used.
        elements: numbers of its parameters that the rank saves.
        tensors: of a version of it.
    """

    full: int
    compute: int
    weights: int
    moments: int
    live: int
    slot: int
    moments_slot: int
    elements: int
    tensors: int = 0

    def at(self, part: UnitPart, level: Level) -> int:
        """Return the bytes at a level, of a part at FULL."""
        if level is Level.COMPUTE:
            return self.compute
        return {UnitPart.WEIGHTS: self.weights, UnitPart.MOMENTS: self.moments}.get(part, self.full)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedRank:
    """A rank of a stage and its units, as a strategy asks for them (`UnitSizes`).

    Attributes:
        rank: of the job, in the first of the equal stages.
        group: number of its data-parallel group in the stage.
        dp_rank: in that group.
        sizes: of every unit that it has, also of those that other ranks save.
        replicated: elements outside experts that all ranks of the group hold, undivided, and their bytes.
    """

    rank: int
    group: int
    dp_rank: int
    ep_rank: int
    sizes: Mapping[UnitId, UnitBytes]
    replicated: tuple[int, int] = (0, 0)

    @property
    def units(self) -> tuple[UnitId, ...]:
        """Whole units."""
        return tuple(self.sizes)

    def owns(self, unit: UnitId) -> bool:
        """Return whether this rank saves any part of a unit."""
        return self.sizes[unit.whole].full > 0

    def num_bytes(self, unit: UnitId, level: Level = Level.FULL, *, alignment: int = 1) -> int:
        """Return the bytes that it saves of a unit, with the gaps that align tensors."""
        return round_up(self.sizes[unit.whole].at(unit.part, level), alignment)

    def slot_bytes(self, unit: UnitId) -> int:
        """Return the bytes of a slot for a unit, or for its moments."""
        sizes = self.sizes[unit.whole]
        return sizes.moments_slot if unit.part is UnitPart.MOMENTS else sizes.slot

    @property
    def full_bytes(self) -> int:
        """Bytes of a snapshot of everything at FULL."""
        return sum(each.full for each in self.sizes.values())

    @property
    def num_elements(self) -> int:
        """Numbers of parameters that it saves."""
        return sum(each.elements for each in self.sizes.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedStage:
    """Pipeline stages that differ only in the numbers of their layers.

    Attributes:
        numbers: of these stages; units and ranks are those of the first.
        elements: of every unit, over the tensor-parallel ranks that divide it.
    """

    numbers: tuple[int, ...]
    ranks: tuple[PlannedRank, ...]
    elements: Mapping[UnitId, int]

    def ep_ranks(self, group: int) -> list[int]:
        """Return ``[data-parallel rank]`` the expert-parallel ranks of a data-parallel group."""
        members = [(each.dp_rank, each.ep_rank) for each in self.ranks if each.group == group]
        return [ep_rank for _, ep_rank in sorted(members)]

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return len({unit.layer_name for unit in self.elements if unit.kind is UnitKind.EXPERT})


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """Numbers of a whole model.

    Attributes:
        num_parameters: of each once, however many ranks hold it.
        num_experts: of an MoE layer; 0 without.
        expert_parameters: of one expert of one layer.
        active_share: of the experts of a layer, those that a token goes to.
        is_grouped: whether the experts of a layer on a rank are one module in training.
    """

    num_parameters: int
    num_experts: int = 0
    num_moe_layers: int = 0
    expert_parameters: int = 0
    active_share: float = 1.0
    is_grouped: bool = False

    @property
    def active_parameters(self) -> float:
        """Parameters that a token passes through, embeddings included."""
        num_experts = self.num_moe_layers * self.num_experts
        return self.num_parameters - num_experts * self.expert_parameters * (1 - self.active_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A training job that need not exist.

    Attributes:
        stages: each kind of them once.
        by_sharding: likewise, if replicated state were divided as "none" and "equal" do.
        dp, ep, tp, expert_tp: data-parallel ranks (context parallelism included), those that divide the
            experts of a layer, and those that divide tensors, outside experts and in them.
        cp: context-parallel ranks.
        global_batch_size, micro_batch_size: samples of an iteration, None if not known, and of a micro-batch.
        expert_part: of the time of a stage, that of its experts.
        is_optimizer_distributed: whether each rank owns a slice of the optimizer's state, which it saves
            whatever the sharding.
        train_iterations: of the whole training, None if that is not known.
        tokens: of an iteration, None if that is not known.
        traffic: what the pipeline sends in an iteration, if that is logged.
        reduced_bytes: of a parameter's gradient as it is reduced.
    """

    model: PlannedModel
    stages: tuple[PlannedStage, ...]
    dp: int
    ep: int
    tp: int
    expert_tp: int
    is_optimizer_distributed: bool
    experts: ExpertFacts
    config: MoeFtConfig
    ranks_per_node: int
    replication_factor: int
    train_iterations: int | None
    measured: MeasuredTimes
    tokens: int | None = None
    traffic: PipelineTraffic | None = None
    by_sharding: Mapping[str, tuple[PlannedStage, ...]] = field(default_factory=dict)
    reduced_bytes: int = 4
    cp: int = 1
    global_batch_size: int | None = None
    micro_batch_size: int = 1
    expert_part: float = 0.0

    @property
    def replica_regions(self) -> Regions:
        """Regions that a peer keeps of a rank without a pool."""
        return regions_at_peers(self.config.memory, self.replication_factor, self.num_nodes)

    def boundary_bytes(self, longest_window: int) -> int:
        """Return the bytes of the boundary log of the rank with the largest one; 0 without a log."""
        interval = self.config.strategy.interval_iterations
        if self.traffic is None or interval is None:
            return 0
        return most_log_bytes(self.traffic, longest_window=longest_window, interval=interval)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return sum(len(stage.numbers) for stage in self.stages)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return sum(len(stage.numbers) * len(stage.ranks) for stage in self.stages)

    @property
    def num_expert_owners(self) -> int:
        """Ranks that hold the same piece of an expert."""
        stage = next(each for each in self.stages if each.num_moe_layers)
        if self.config.elastic.expert_slots:
            return 1
        (expert, *_) = (unit for unit in stage.ranks[0].units if unit.kind is UnitKind.EXPERT)
        return sum(expert in rank.sizes for rank in stage.ranks) // self.expert_tp

    def divided(self, sharding: str) -> "PlannedJob":
        """Return the job with another --moe-ft-sharding, of one whose optimizer is not distributed."""
        strategy = replace(self.config.strategy, sharding=sharding)
        stages = self.by_sharding["none" if sharding == "none" else "equal"]
        return replace(self, stages=stages, config=replace(self.config, strategy=strategy))

    def with_config(self, config: MoeFtConfig) -> "PlannedJob":
        """Return the job with other settings of moe_ft.

        Raises:
            ConfigError: if there are fewer nodes than it takes for so many replicas.
        """
        num_replicas = planned_replicas(
            config.memory.num_replicas, self.num_ranks, self.ranks_per_node
        )
        return replace(self, config=config, replication_factor=num_replicas)

    def by_rank[Value](self, values: Sequence[Sequence[Value]]) -> list[Value]:
        """Return ``[rank]`` values, of ``[stage][rank of the stage]`` ones of each kind of stage."""
        ordered = {
            number: of_stage
            for stage, of_stage in zip(self.stages, values, strict=True)
            for number in stage.numbers
        }
        return [value for number in sorted(ordered) for value in ordered[number]]

    @property
    def heaviest(self) -> PlannedRank:
        """The rank whose snapshot of everything is the largest."""
        return max(self.ranks, key=lambda rank: rank.full_bytes)

    @property
    def ranks(self) -> list[PlannedRank]:
        """The ranks of each kind of stage."""
        return [rank for stage in self.stages for rank in stage.ranks]

    @property
    def full_bytes(self) -> list[int]:
        """``[rank]`` bytes of a snapshot of everything at FULL."""
        return self.by_rank([[rank.full_bytes for rank in stage.ranks] for stage in self.stages])

    def gradient_bytes(self, *, has_experts: bool = True) -> int:
        """Return the bytes of the gradients of the rank with the most; 0 where peers get state.

        Args:
            has_experts: whether every snapshot holds the experts.
        """
        if not (self.config.memory.sends_gradients and self.replication_factor):
            return 0
        return self.reduced_bytes * sum(each.elements for each in self._followed(has_experts))

    def sent_share(self, snapshot_bytes: float, *, has_experts: bool = True) -> float:
        """Return the bytes that a peer gets for each byte of a snapshot."""
        if not (gradient_bytes := self.gradient_bytes(has_experts=has_experts)):
            return 1.0
        saved_bytes = sum(each.full for each in self._followed(has_experts)) - gradient_bytes
        return 1 - saved_bytes / snapshot_bytes

    def _followed(self, has_experts: bool) -> list[UnitBytes]:
        """Return the sizes of what every snapshot holds."""
        sizes = self.heaviest.sizes.items()
        return [each for unit, each in sizes if has_experts or unit.kind is not UnitKind.EXPERT]

    @property
    def persists(self) -> bool:
        """True if checkpoints go to storage."""
        return self.config.storage.persists

    @property
    def reads_storage(self) -> bool:
        """True if the state of a lost node comes from storage."""
        return self.persists and not self.replication_factor and self.num_nodes > 1

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may have fewer ranks."""
        return math.ceil(self.num_ranks / self.ranks_per_node)

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer of the GPU with the most: 16-bit weights, 18 in all."""
        return max(
            WEIGHT_BYTES * self._held(stage, rank) + OPTIMIZER_BYTES * rank.num_elements
            for stage in self.stages
            for rank in stage.ranks
        )

    def _held(self, stage: PlannedStage, rank: PlannedRank) -> int:
        """Return the parameters whose weights and gradients a rank has, those in slots included."""
        homes: list[UnitId] = []
        if num_slots := self.config.elastic.expert_slots:
            homes = [unit for unit in rank.sizes if unit.kind is UnitKind.EXPERT]
        whole = sum(stage.elements[unit] for unit in rank.sizes.keys() - homes) // self.tp
        slots = num_slots * stage.num_moe_layers * self.model.expert_parameters
        return whole + sum(rank.sizes[unit].elements for unit in homes) + slots

    @property
    def persist_interval(self) -> float:
        """Snapshots (or windows) for each one that goes to storage; infinite if none does before the end."""
        return self.config.storage.persist_interval or math.inf

    @property
    def breakpoint_bytes(self) -> int:
        """Bytes of the largest breakpoint of a rank, whatever format snapshots have; 0 without one."""
        if not self.config.memory.breakpoints:
            return 0
        return max(sum(each.live for each in rank.sizes.values()) for rank in self.ranks)

    def index_bytes(self, window: int = 1) -> int:
        """Return the bytes of the largest index of a region, for windows of so many snapshots."""
        return max(
            index_bytes(
                sum(each.tensors for each in rank.sizes.values()),
                window=window,
                num_experts=stage.num_moe_layers * self.model.num_experts,
            )
            for stage in self.stages
            for rank in stage.ranks
        )

    def interval(self, snapshot_bytes: int, persisted_bytes: int) -> int:
        """Return the iterations between snapshots.

        Automatic ones follow from the bandwidths, as if nothing else slowed training down.

        Args:
            snapshot_bytes: that the rank with the most copies.
            persisted_bytes: that it writes to storage.

        Raises:
            ConfigError: if the interval is automatic and the bandwidths are not known.
        """
        given, measured = self.config.strategy.interval_iterations, self.measured
        if given is not None:
            return given
        if measured.iteration_s is None or measured.bandwidth is None:
            raise ConfigError(
                "--moe-ft-interval=auto needs --iteration-s and --bandwidth: the interval follows from the "
                "time of a copy. Give them before the --, or plan with a number."
            )
        copy_s = snapshot_bytes / measured.bandwidth
        persist_s = 0.0
        if measured.storage_bandwidth is not None and self.persists:
            persist_s = persisted_bytes / measured.storage_bandwidth / self.persist_interval
        cost = CheckpointCost(
            iteration_s=measured.iteration_s,
            overhead_s=max(0.0, copy_s - measured.hidden_s),
            completion_s=copy_s + persist_s,
        )
        return choose_interval(cost, self.config.strategy.overhead_limit)
