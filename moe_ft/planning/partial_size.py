"""How much each rank saves with partial experts: sizes, the bottleneck rank, what hides behind training.

One pipeline stage without tensor parallelism, as in MoC-System's evaluation. Which experts are selected
is planning/selection.py; sizes of models are planning/model_size.py; the rules by which replicated state
is divided are planning/sharding.py.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moe_ft.errors import PlanError
from moe_ft.planning.model_size import ByteModel, ModelShape, non_expert_modules
from moe_ft.planning.selection import (
    ExpertLayout,
    advance,
    check_k,
    rank_counts,
    select_sequential,
)
from moe_ft.planning.sharding import adaptive_shares, assign_greedy


class Sharding(StrEnum):
    """Who saves what several ranks hold alike."""

    NONE = "none"  # rank 0 all non-experts, the first expert-parallel group all experts
    EQUAL = "equal"  # experts and non-experts in equal parts
    ADAPTIVE = "adaptive"  # experts in equal parts; non-experts where there are fewer experts


class ExpertUnit(StrEnum):
    """The smallest part of the experts that a rank saves, where several ranks hold the same experts."""

    EXPERT = "expert"  # whole experts go to one of them (MoC-System, section 4.1, its text)
    FRACTION = "fraction"  # each has a part of every expert (its Figure 7)


class NonExpertUnit(StrEnum):
    """The smallest part of the non-experts that a rank saves."""

    ELEMENT = "element"
    MODULE = "module"  # MoC-System, section 4.2: attention, FFN, the word embeddings...


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingLayout:
    """The ranks of a stage and who of them saves what.

    Attributes:
        dp: data-parallel ranks, all of which hold the non-experts.
        ep: expert-parallel ranks; dp / ep groups of them hold the same experts. Rank r is rank r % ep
            of group r // ep.
        sharding: of what several ranks hold alike.
        is_optimizer_distributed: whether each rank owns a slice of the optimizer's state already, which
            it saves whatever the sharding. Slices are taken to be equal, also of each expert.
        expert_unit: smallest part of the experts.
        non_expert_unit: smallest part of the non-experts.
    """

    dp: int
    ep: int
    sharding: Sharding = Sharding.EQUAL
    is_optimizer_distributed: bool = True
    expert_unit: ExpertUnit = ExpertUnit.FRACTION
    non_expert_unit: NonExpertUnit = NonExpertUnit.ELEMENT

    def __post_init__(self) -> None:
        if self.dp < 1 or self.ep < 1 or self.dp % self.ep:
            raise PlanError(f"ep={self.ep} must divide dp={self.dp}, both at least 1")

    @property
    def num_groups(self) -> int:
        """Expert-parallel groups, that is, ranks that hold the same experts."""
        return self.dp // self.ep


@dataclass(frozen=True, slots=True)
class Workload:
    """What every rank saves in each of the snapshots after which the ranks' turns repeat.

    Attributes:
        rotation: ``[snapshot][rank]`` bytes.
    """

    rotation: tuple[tuple[int, ...], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of one snapshot over all ranks, the same for each."""
        return sum(self.rotation[0])

    @property
    def bottleneck_bytes(self) -> int:
        """The most that a rank ever saves in one snapshot."""
        return max(map(max, self.rotation))

    @property
    def bottleneck_rank(self) -> int:
        """The lowest rank that ever saves that much."""
        return self.most_by_rank().index(self.bottleneck_bytes)

    def most_by_rank(self) -> list[int]:
        """Return ``[rank]`` the most that it saves in one snapshot."""
        return [max(of_rank) for of_rank in zip(*self.rotation, strict=True)]

    def mean_by_rank(self) -> list[float]:
        """Return ``[rank]`` what it saves in a snapshot on average."""
        return [sum(of_rank) / len(of_rank) for of_rank in zip(*self.rotation, strict=True)]


def checkpoint_bytes(shape: ModelShape, k: int, byte_model: ByteModel) -> int:
    """Return the bytes of a checkpoint with k experts of each MoE layer, over all ranks.

    Source: MoC-System, equations 5 (k = N) and 6, with the classes of bytes kept apart.

    Raises:
        PlanError: unless 1 <= k <= the experts of a layer.
    """
    _check_k(shape, k)
    partial = byte_model.weights_by_rule[0] + byte_model.optimizer_by_rule[0]
    experts = k * partial + shape.num_experts * (byte_model.total - partial)
    return (
        shape.num_non_expert_parameters * byte_model.total
        + shape.num_moe_layers * shape.expert_parameters * experts
    )


def rank_bytes(
    shape: ModelShape, expert_counts: Sequence[int], byte_model: ByteModel, layout: SavingLayout
) -> list[int]:
    """Return ``[rank]`` the bytes that each saves in one snapshot.

    Args:
        shape: of the model.
        expert_counts: ``[expert-parallel rank]`` selected experts, over all layers.
        byte_model: bytes per parameter.
        layout: of the ranks.

    Source: MoC-System, equation 8; its optimizer terms are divided by D_dp, because only then the ranks
    together save the state once where there are several groups.
    """
    loads = _expert_loads(shape, expert_counts, byte_model, layout)
    replicated = byte_model.total
    if layout.is_optimizer_distributed:
        replicated = byte_model.weights
        owned = shape.num_non_expert_parameters * byte_model.optimizer
        loads = _add(loads, _equal_parts(owned, layout.dp))
    return _add(loads, _non_expert_shares(shape, replicated, loads, layout))


def plan_workload(
    shape: ModelShape, k: int, byte_model: ByteModel, layout: SavingLayout
) -> Workload:
    """Return what every rank saves while sequential selection goes around the ranks once.

    Args:
        shape: of the model.
        k: experts of each MoE layer in a snapshot.
        byte_model: bytes per parameter.
        layout: of the ranks.

    Raises:
        PlanError: unless 1 <= k <= the experts of a layer, which the expert-parallel ranks must divide.
    """
    _check_k(shape, k)
    experts = _experts_of(shape, layout.ep)
    cursors = experts.first_cursors(k)
    rotation = []
    # Which ranks the next k experts are on depends only on the cursors modulo ep, which divides N.
    for _ in range(layout.ep // math.gcd(layout.ep, k)):
        counts = rank_counts(experts, select_sequential(experts, cursors, k))
        rotation.append(tuple(rank_bytes(shape, counts, byte_model, layout)))
        cursors = advance(experts, cursors, k)
    return Workload(tuple(rotation))


def is_imbalanced(shape: ModelShape, k: int, layout: SavingLayout) -> bool:
    """Return whether equal sharding leaves ranks with more experts than others.

    Source: MoC-System, equation 9. Its second condition asks whether whole experts can be divided among
    the groups: it does not arise with fractions of experts.
    """
    selected = k * shape.num_moe_layers
    if selected % layout.ep:
        return True
    has_whole_experts = layout.expert_unit is ExpertUnit.EXPERT
    return has_whole_experts and selected // layout.ep % layout.num_groups != 0


def reduction(num_bytes: float, reference_bytes: float) -> float:
    """Return by which fraction something is smaller than a reference; negative if it is larger."""
    return 1 - num_bytes / reference_bytes


def largest_hidden_k(
    shape: ModelShape,
    byte_model: ByteModel,
    layout: SavingLayout,
    *,
    bandwidth_bytes_per_s: float,
    hidden_s: float,
) -> int:
    """Return the largest k whose snapshots end while the next iteration runs forward and backward.

    Args:
        shape: of the model.
        byte_model: bytes per parameter.
        layout: of the ranks.
        bandwidth_bytes_per_s: from device to host, of each rank.
        hidden_s: forward and backward of an iteration.

    Returns:
        Between 1 and the experts of a layer; 0 if not even one expert per layer is hidden. The
        bottleneck grows with k; only with whole modules may a slightly larger k fit as well.

    Source: MoC-System, section 5.3.
    """
    most = bandwidth_bytes_per_s * hidden_s

    def bottleneck_bytes(k: int) -> int:
        return plan_workload(shape, k, byte_model, layout).bottleneck_bytes

    return bisect_right(range(1, shape.num_experts + 1), most, key=bottleneck_bytes)


def smallest_interval(
    bottleneck_bytes: int, *, bandwidth_bytes_per_s: float, iteration_s: float
) -> int:
    """Return how many iterations at least lie between checkpoints that are persisted one at a time.

    Args:
        bottleneck_bytes: that the rank with the most persists.
        bandwidth_bytes_per_s: from host to storage, of each rank.
        iteration_s: of a whole iteration.

    Source: MoC-System, section 5.3.
    """
    return max(1, math.ceil(bottleneck_bytes / bandwidth_bytes_per_s / iteration_s))


def _experts_of(shape: ModelShape, ep: int) -> ExpertLayout:
    return ExpertLayout(num_layers=shape.num_moe_layers, num_experts=shape.num_experts, ep_size=ep)


def _check_k(shape: ModelShape, k: int) -> None:
    check_k(_experts_of(shape, 1), k)


def _expert_loads(
    shape: ModelShape, counts: Sequence[int], byte_model: ByteModel, layout: SavingLayout
) -> list[int]:
    """Return ``[rank]`` the bytes of experts that each saves."""
    owned, shared = byte_model.optimizer_by_rule, byte_model.weights_by_rule
    if not layout.is_optimizer_distributed:
        shared = (shared[0] + owned[0], shared[1] + owned[1])
        owned = (0, 0)
    num_local = shape.num_moe_layers * shape.num_experts // layout.ep
    size = shape.expert_parameters
    loads = [0] * layout.dp
    for ep_rank, selected in enumerate(counts):
        owned_bytes = size * (selected * owned[0] + num_local * owned[1])
        parts = _equal_parts(owned_bytes, layout.num_groups)
        for num_experts, num_bytes in ((selected, shared[0]), (num_local, shared[1])):
            parts = _add(parts, _replica_parts(num_experts, size * num_bytes, layout))
        for group, part in enumerate(parts):
            loads[group * layout.ep + ep_rank] = part
    return loads


def _replica_parts(num_experts: int, expert_bytes: int, layout: SavingLayout) -> list[int]:
    """Return ``[group]`` the bytes of experts that the ranks with the same experts save."""
    if layout.sharding is Sharding.NONE:
        return [num_experts * expert_bytes, *[0] * (layout.num_groups - 1)]
    if layout.expert_unit is ExpertUnit.FRACTION:
        return _equal_parts(num_experts * expert_bytes, layout.num_groups)
    least, more = divmod(num_experts, layout.num_groups)
    return [(least + (group < more)) * expert_bytes for group in range(layout.num_groups)]


def _non_expert_shares(
    shape: ModelShape, parameter_bytes: int, loads: Sequence[int], layout: SavingLayout
) -> list[int]:
    """Return ``[rank]`` the bytes of replicated non-experts that each saves."""
    sizes = [count * parameter_bytes for count in non_expert_modules(shape).values()]
    if layout.sharding is Sharding.NONE:
        return [sum(sizes), *[0] * (layout.dp - 1)]
    is_adaptive = layout.sharding is Sharding.ADAPTIVE
    if layout.non_expert_unit is NonExpertUnit.ELEMENT:
        total = sum(sizes)
        return adaptive_shares(total, loads) if is_adaptive else _equal_parts(total, layout.dp)
    shares = [0] * layout.dp
    ranks = assign_greedy(sizes, loads if is_adaptive else shares)
    for size, rank in zip(sizes, ranks, strict=True):
        shares[rank] += size
    return shares


def _equal_parts(total: int, count: int) -> list[int]:
    return [total * (index + 1) // count - total * index // count for index in range(count)]


def _add(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]
