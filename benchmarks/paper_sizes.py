"""MoC-System's own arithmetic of checkpoint sizes, only for comparison with the figures that it prints.

14 bytes of a parameter, and equal slices of everything that several ranks hold: not what training does, which
is strategies/partial/size.py. One pipeline stage without tensor parallelism, as in the paper's evaluation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace

from benchmarks.paper_models import ModelShape, Sharding, non_expert_modules
from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.sharding import adaptive_shares
from moe_ft.strategies.partial.selection import advance, rank_counts, select_sequential
from moe_ft.strategies.partial.size import Workload


class ExpertUnit(StrEnum):
    """The smallest part of the experts that a rank saves, where several ranks hold the same experts."""

    EXPERT = "expert"  # whole experts go to one of them (MoC-System, section 4.1, its text)
    FRACTION = "fraction"  # each has a part of every expert (its Figure 7)


class NonExpertUnit(StrEnum):
    """The smallest part of the non-experts that a rank saves."""

    ELEMENT = "element"
    MODULE = "module"  # MoC-System, section 4.2: attention, FFN, the word embeddings...


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperLayout:
    """The ranks of a stage and who of them saves what.

    Slices of a distributed optimizer are equal, also those of each expert.

    Attributes:
        dp: data-parallel ranks, all of which hold the non-experts.
        ep: expert-parallel ranks; dp / ep groups of them hold the same experts. Rank r is rank r % ep
            of group r // ep.
        is_optimizer_distributed: whether each rank owns a slice of the optimizer's state already, which
            it saves whatever the sharding.
        expert_unit: smallest part of the experts.
        non_expert_unit: smallest part of the non-experts.
    """

    dp: int
    ep: int
    sharding: Sharding = Sharding.EQUAL
    is_optimizer_distributed: bool = True
    expert_unit: ExpertUnit = ExpertUnit.FRACTION
    non_expert_unit: NonExpertUnit = NonExpertUnit.ELEMENT

    @property
    def num_groups(self) -> int:
        """Expert-parallel groups, that is, ranks that hold the same experts."""
        return self.dp // self.ep


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperBytes:
    """Bytes per parameter that a checkpoint holds, by class, and which classes leave experts out.

    The default is MoC-System's equation 6: experts that are not selected are left out altogether. Its
    measurements (Fig. 10a, Table 3) follow only if the master weights of all experts are saved.

    Attributes:
        weights: of the weights that the forward pass uses.
        master: of the optimizer's own weights.
        moments: of its first and second moments.
        master_always_full: whether experts that are not selected save their master weights too.
        weights_always_full: the same for weights.
        moments_always_full: the same for moments.
    """

    weights: int = 2
    master: int = 4
    moments: int = 8
    master_always_full: bool = False
    weights_always_full: bool = False
    moments_always_full: bool = False

    @property
    def optimizer(self) -> int:
        """B_o: bytes of the optimizer's state for a parameter."""
        return self.master + self.moments

    @property
    def total(self) -> int:
        """Bytes of everything for a parameter."""
        return self.weights + self.optimizer

    @property
    def optimizer_by_rule(self) -> tuple[int, int]:
        """Bytes of the optimizer's state that (only selected, all) experts save."""
        always = self.master * self.master_always_full + self.moments * self.moments_always_full
        return self.optimizer - always, always

    @property
    def weights_by_rule(self) -> tuple[int, int]:
        """Bytes of the weights that (only selected, all) experts save."""
        return (0, self.weights) if self.weights_always_full else (self.weights, 0)


def checkpoint_bytes(shape: ModelShape, k: int, byte_model: PaperBytes) -> int:
    """Return the bytes of a checkpoint with k experts of each MoE layer, over all ranks.

    Source: MoC-System, equations 5 (k = N) and 6, with the classes of bytes kept apart.
    """
    partial = byte_model.weights_by_rule[0] + byte_model.optimizer_by_rule[0]
    experts = k * partial + shape.num_experts * (byte_model.total - partial)
    return (
        shape.num_non_expert_parameters * byte_model.total
        + shape.num_moe_layers * shape.expert_parameters * experts
    )


def rank_bytes(
    shape: ModelShape, expert_counts: Sequence[int], byte_model: PaperBytes, layout: PaperLayout
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


def paper_workload(
    shape: ModelShape, k: int, byte_model: PaperBytes, layout: PaperLayout
) -> Workload:
    """Return what every rank saves while sequential selection goes around the ranks once.

    Args:
        shape: of the model.
        k: experts of each MoE layer in a snapshot.
        byte_model: bytes per parameter.
        layout: of the ranks.
    """
    experts = _experts_of(shape, layout.ep)
    cursors = experts.first_cursors(k)
    rotation = []
    # Which ranks the next k experts are on depends only on the cursors modulo ep, which divides N.
    for _ in range(layout.ep // math.gcd(layout.ep, k)):
        counts = rank_counts(experts, select_sequential(experts, cursors, k))
        rotation.append(tuple(rank_bytes(shape, counts, byte_model, layout)))
        cursors = advance(experts, cursors, k)
    return Workload(tuple(rotation))


def _experts_of(shape: ModelShape, ep: int) -> ExpertLayout:
    return ExpertLayout(num_layers=shape.num_moe_layers, num_experts=shape.num_experts, ep_size=ep)


def _expert_loads(
    shape: ModelShape, counts: Sequence[int], byte_model: PaperBytes, layout: PaperLayout
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


def _replica_parts(num_experts: int, expert_bytes: int, layout: PaperLayout) -> list[int]:
    """Return ``[group]`` the bytes of experts that the ranks with the same experts save."""
    if layout.sharding is Sharding.NONE:
        return [num_experts * expert_bytes, *[0] * (layout.num_groups - 1)]
    if layout.expert_unit is ExpertUnit.FRACTION:
        return _equal_parts(num_experts * expert_bytes, layout.num_groups)
    least, more = divmod(num_experts, layout.num_groups)
    return [(least + (group < more)) * expert_bytes for group in range(layout.num_groups)]


def _non_expert_shares(
    shape: ModelShape, parameter_bytes: int, loads: Sequence[int], layout: PaperLayout
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


def assign_greedy(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Assign whole modules to ranks: the largest first, each to the rank with the least load so far.

    Args:
        sizes: ``[module]`` bytes.
        loads: ``[rank]`` bytes that a rank saves anyway.

    Returns:
        ``[module]`` rank that saves it. Of equal modules the first is assigned first; of equally loaded
        ranks the lowest is chosen.

    Source: MoC-System, section 4.3, adaptive sharding; with loads of 0 its equal sharding (4.2).
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapify(heap)
    ranks = [0] * len(sizes)
    for module in sorted(range(len(sizes)), key=lambda module: -sizes[module]):
        load, rank = heap[0]
        ranks[module] = rank
        heapreplace(heap, (load + sizes[module], rank))
    return ranks


def _equal_parts(total: int, count: int) -> list[int]:
    return [total * (index + 1) // count - total * index // count for index in range(count)]


def _add(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]
