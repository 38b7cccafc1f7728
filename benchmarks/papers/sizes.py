"""MoC-System's own arithmetic of checkpoint sizes, next to what it prints and to what moe_ft saves.

14 bytes of a parameter, and equal slices of everything that several ranks hold: not what training does, which
is strategies/partial/plan.py. One pipeline stage without tensor parallelism, as in the paper's evaluation.
Two ways of counting bytes: equation 6 (experts that are not selected are left out) and "master in full" (the
master weights of all experts are saved). Bottleneck: the most that a rank saves in one snapshot while
sequential selection goes around. Verdicts: REPRODUCED if equal when rounded as printed, CLOSE within 5 % of
the printed figure, else NOT.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace

from benchmarks.papers.models import (
    PRESETS,
    ModelShape,
    Sharding,
    non_expert_modules,
    planned_preset,
)
from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.sharding import adaptive_shares
from moe_ft.strategies.partial.plan import PartialPlan, Workload
from moe_ft.strategies.partial.selection import (
    PartialConfig,
    advance,
    rank_counts,
    select_sequential,
)


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
        non_expert_unit: smallest part of the non-experts.
    """

    dp: int
    ep: int
    sharding: Sharding = Sharding.EQUAL
    is_optimizer_distributed: bool = True
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
    return _equal_parts(num_experts * expert_bytes, layout.num_groups)


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


# --- figures that the paper prints, and what moe_ft saves of the same models

CASES = {"Case 1": (8, 8), "Case 2": (16, 16), "Case 3": (16, 8)}  # Table 2: (dp, ep)
KS = (1, 2, 4, 8, 16)
BYTE_MODELS = {"eq. 6": PaperBytes(), "master in full": PaperBytes(master_always_full=True)}
UNITS = {"elements": NonExpertUnit.ELEMENT, "modules": NonExpertUnit.MODULE}
CLOSE = 0.05
SMALL, LARGE = PRESETS["gpt-125m-8e"], PRESETS["gpt-350m-16e"]

FULL_REDUCTION = (12.0, 28.0)  # section 6.2.1, % over the cases, equal sharding against none
PARTIAL_REDUCTION = (22.0, 29.0)  # the same with PEC; k not printed
ADAPTIVE_REDUCTION = (3.7, 6.1)  # adaptive against equal sharding, k = 1

Row = tuple[object, ...]


def verdict(ours: float, paper: float, digits: int) -> str:
    """Compare a figure with one that is printed with so many digits."""
    if round(ours, digits) == paper:
        return "REPRODUCED"
    miss = ours - paper
    word = "CLOSE" if abs(miss) <= CLOSE * abs(paper) else "NOT"
    return f"{word} ({miss:+.{digits + 1}f})"


def model_rows() -> Iterator[Row]:
    """Yield parameters (Table 1) and shares of a full checkpoint (Fig. 2)."""
    small, large = SMALL.num_parameters / 1e6, LARGE.num_parameters / 1e9
    yield "GPT-125M-8E, parameters, 1e6", f"{small:.1f}", "323", verdict(small, 323.0, 0)
    yield "GPT-350M-16E, parameters, 1e9", f"{large:.3f}", "1.7", verdict(large, 1.7, 1)
    large = LARGE.num_parameters / 2**30
    yield "GPT-350M-16E, parameters, 2^30", f"{large:.3f}", "1.7", verdict(large, 1.7, 1)
    bytes_of, total = PaperBytes(), checkpoint_bytes(LARGE, LARGE.num_experts, PaperBytes())
    expert, other = LARGE.num_expert_parameters, LARGE.num_non_expert_parameters
    for name, num_bytes, printed in (
        ("expert weights", expert * bytes_of.weights, 12),
        ("non-expert weights", other * bytes_of.weights, 2),
        ("expert optimizer", expert * bytes_of.optimizer, 74),
        ("non-expert optimizer", other * bytes_of.optimizer, 12),
    ):
        share = 100 * num_bytes / total
        yield f"share of {name}, %", f"{share:.1f}", printed, verdict(share, printed, 0)


def size_rows() -> Iterator[Row]:
    """Yield the size of a checkpoint with one expert against a full one (Fig. 10a), in %."""
    for (model, shape), (name, byte_model) in itertools.product(
        PRESETS.items(), BYTE_MODELS.items()
    ):
        full = checkpoint_bytes(shape, shape.num_experts, byte_model)
        num_bytes = checkpoint_bytes(shape, 1, byte_model)
        share = 100 * num_bytes / full
        paper = ("42.3", verdict(share, 42.3, 1)) if shape is LARGE else ("", "")
        yield model, name, 1, f"{num_bytes / 1e6:,.0f}", f"{share:.1f}", *paper


def table_3_rows() -> Iterator[Row]:
    """Yield the relative sizes of Table 3, whose rows leave experts out of some classes of bytes only."""
    full = checkpoint_bytes(LARGE, LARGE.num_experts, PaperBytes())
    for name, printed, weights_full, optimizer_full in (
        ("W: weights only", 0.88, False, True),
        ("O: optimizer only", 0.54, True, False),
        ("WO: both", 0.42, False, False),
    ):
        cells: list[object] = []
        for master_full in (False, True):
            byte_model = PaperBytes(
                weights_always_full=weights_full,
                master_always_full=optimizer_full or master_full,
                moments_always_full=optimizer_full,
            )
            share = checkpoint_bytes(LARGE, 1, byte_model) / full
            cells += [f"{share:.3f}", verdict(share, printed, 2)]
        yield name, printed, *cells


def bottlenecks(
    shape: ModelShape, case: str, k: int, byte_model: PaperBytes, unit: NonExpertUnit
) -> dict[Sharding, int]:
    """Return the bytes of the bottleneck rank with every sharding."""
    dp, ep = CASES[case]
    return {
        sharding: paper_workload(
            shape,
            k,
            byte_model,
            PaperLayout(dp=dp, ep=ep, sharding=sharding, non_expert_unit=unit),
        ).bottleneck_bytes
        for sharding in Sharding
    }


def _ks(shape: ModelShape) -> list[int]:
    return [k for k in KS if k <= shape.num_experts]


def reduction(num_bytes: float, reference_bytes: float) -> float:
    """Return by which fraction something is smaller than a reference; negative if it is larger."""
    return 1 - num_bytes / reference_bytes


def _reductions(most: dict[Sharding, int]) -> tuple[float, float]:
    """Return in % what equal sharding saves against none, and adaptive against equal."""
    return (
        100 * reduction(most[Sharding.EQUAL], most[Sharding.NONE]),
        100 * reduction(most[Sharding.ADAPTIVE], most[Sharding.EQUAL]),
    )


def range_rows() -> Iterator[Row]:
    """Yield ranges over the cases against those that the paper prints, in %."""
    for unit_name, unit in UNITS.items():
        for (name, byte_model), k in itertools.product(BYTE_MODELS.items(), KS):
            of_cases = [_reductions(bottlenecks(LARGE, c, k, byte_model, unit)) for c in CASES]
            equal, adaptive = zip(*of_cases, strict=True)
            if k == LARGE.num_experts:
                if byte_model is BYTE_MODELS["eq. 6"]:  # full checkpoints are the same in both
                    yield _range_row("full, equal", "both", k, unit_name, equal, FULL_REDUCTION, 0)
                continue
            yield _range_row("partial, equal", name, k, unit_name, equal, PARTIAL_REDUCTION, 0)
            if k == 1:
                yield _range_row("adaptive", name, k, unit_name, adaptive, ADAPTIVE_REDUCTION, 1)


def _range_row(
    what: str,
    byte_model: str,
    k: int,
    unit: str,
    values: Sequence[float],
    paper: tuple[float, float],
    digits: int,
) -> Row:
    low, high = min(values), max(values)
    return (
        what,
        byte_model,
        k,
        unit,
        f"{low:.1f} to {high:.1f}",
        f"{paper[0]:.{digits}f} to {paper[1]:.{digits}f}",
        verdict(low, paper[0], digits),
        verdict(high, paper[1], digits),
    )


def training_rows() -> Iterator[Row]:
    """Yield what moe_ft saves in every case that the model's experts allow."""
    for (model, shape), (case, (dp, ep)) in itertools.product(PRESETS.items(), CASES.items()):
        if shape.num_experts % ep:
            continue
        flags = ("--moe-ft-strategy", "partial")
        replicated = planned_preset(shape, *flags, dp=dp, ep=ep)
        jobs = [planned_preset(shape, *flags, "--use-distributed-optimizer", dp=dp, ep=ep)]
        jobs += [replicated.divided(sharding) for sharding in Sharding]
        sizes = [PartialPlan(job, PartialConfig()) for job in jobs]
        for k in _ks(shape):
            workloads = [each.plan_workload(k) for each in sizes]
            num_bytes = workloads[0].total_bytes
            most = (f"{workload.bottleneck_bytes / 1e6:,.1f}" for workload in workloads)
            yield model, case, k, f"{num_bytes / 1e6:,.0f}", f"{num_bytes / dp / 1e6:,.1f}", *most
