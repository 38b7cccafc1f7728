"""Bytes that each rank saves with partial experts, as training divides state among ranks.

They are those of master weights and moments, without tensor parallelism; records, headers and the gaps that
align tensors are left out. selection.py selects the experts, planning/ownership.py divides them, and
planning/model_size.py has the sizes of models. The paper counts other bytes and other slices:
benchmarks/paper_sizes.py.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np

from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.host_memory import MemoryShare, num_slots, slot_bytes
from moe_ft.planning.model_size import ByteModel, ModelShape
from moe_ft.planning.ownership import SavingLayout, Sharding, owned_experts, owned_others
from moe_ft.planning.sharding import adaptive_shares
from moe_ft.strategies.partial.selection import (
    Selection,
    advance,
    rank_counts,
    select_sequential,
    sequential_bottleneck,
)
from moe_ft.units import UnitId, UnitKind

Units = Mapping[UnitId, int]  # parameters of each


@dataclass(frozen=True, slots=True)
class Workload:
    """Bytes that every rank saves in each of the snapshots after which the ranks' turns repeat.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """A model and the ranks that save it.

    Attributes:
        stages: ``[stage]`` the parameters of its units (planning.model_size.stage_units).
        layout: of the ranks of each stage; expert-parallel ranks divide the experts of a layer.
        byte_model: of what a snapshot holds: master weights and moments.
        bucket_parameters: after which a bucket of the distributed optimizer is full on the first stage
            (--overlap-grad-reduce); None: every buffer is one.
    """

    shape: ModelShape
    stages: tuple[Units, ...]
    layout: SavingLayout
    byte_model: ByteModel
    bucket_parameters: int | None = None

    def plan_workload(self, k: int) -> Workload:
        """Return what every rank of every stage saves while sequential selection goes around the experts."""
        by_stage = [stage.rotation(k) for stage in self._stages()]
        return Workload(tuple(tuple(chain(*of_ranks)) for of_ranks in zip(*by_stage, strict=True)))

    def automatic_k(self, budget_bytes: float) -> int:
        """Return the k that --moe-ft-k-snapshot auto takes where ranks can copy so many bytes.

        It allows for one rank having all experts that are selected on its expert-parallel rank, and so is
        less than the largest that is hidden where several ranks share these.
        """
        return min(stage.automatic_k(budget_bytes) for stage in self._stages())

    def memory_share(self, k: int | None) -> MemoryShare:
        """Return the host memory of the rank that needs the most.

        Args:
            k: experts of each MoE layer in a snapshot; None if it may become all of them (auto, Dynamic-K).
        """
        shares = chain.from_iterable(stage.memory_shares(k) for stage in self._stages())
        return max(shares, key=lambda share: share.own_bytes(persists=False))

    def _stages(self) -> "Iterator[_Stage]":
        for number, units in enumerate(self.stages):
            yield _Stage(self, units, self.bucket_parameters if number == 0 else None)


class _Stage:
    """Bytes that the ranks of one stage save; ranks are numbered within it."""

    def __init__(self, model: SavedModel, units: Units, bucket_parameters: int | None) -> None:
        moe_layers = {unit.layer_name for unit in units if unit.kind is UnitKind.EXPERT}
        layout = model.layout
        self._layout = layout
        self._experts = ExpertLayout(
            num_layers=len(moe_layers), num_experts=model.shape.num_experts, ep_size=layout.ep
        )
        self._owned = owned_experts(
            model.shape, len(moe_layers), layout, bucket_parameters=bucket_parameters
        )
        byte_model = model.byte_model
        self._rotating_bytes, self._fixed_bytes = byte_model.optimizer_by_rule
        self._bytes = byte_model.optimizer
        self._num_rotating = 2 + (not byte_model.master_always_full)
        self._num_others = sum(
            count for unit, count in units.items() if unit.kind is not UnitKind.EXPERT
        )

    @property
    def _unit_bytes(self) -> int:
        """The most that a rank saves of an expert."""
        return int(self._owned.max(initial=0)) * self._rotating_bytes

    def rotation(self, k: int) -> Iterator[list[int]]:
        """Yield ``[rank]`` bytes, for each snapshot until the selection is that of the first."""
        experts = self._experts
        cursors = experts.first_cursors(k)
        for _ in range(experts.num_experts // math.gcd(experts.num_experts, k)):
            yield self._rank_bytes(select_sequential(experts, cursors, k))
            cursors = advance(experts, cursors, k)

    def _rank_bytes(self, selection: Selection) -> list[int]:
        """Return ``[rank]`` the bytes that each saves in a snapshot."""
        layout, experts = self._layout, self._experts
        selected = np.zeros((experts.num_layers, experts.num_experts))
        for layer, chosen in enumerate(selection):
            selected[layer, list(chosen)] = 1
        by_rank = selected.reshape(experts.num_layers, experts.ep_size, experts.num_local)
        # In floating point, which is exact below 2 ** 53 elements and much faster.
        elements = np.einsum("gle,lre->gr", self._owned.astype(np.float64), by_rank, optimize=True)
        of_experts = elements.astype(np.int64) * self._rotating_bytes
        others = self._others(rank_counts(experts, selection))
        always = self._always_bytes()
        return [
            int(of_experts[divmod(rank, layout.ep)]) + always[rank // layout.ep] + others[rank]
            for rank in range(layout.dp)
        ]

    def _always_bytes(self) -> list[int]:
        """Return ``[group]`` what every snapshot holds of a rank's experts."""
        return [int(count) * self._fixed_bytes for count in self._owned.sum(axis=(1, 2))]

    def _others(self, counts: Sequence[int]) -> list[int]:
        """Return ``[rank]`` the bytes of what is no expert.

        Args:
            counts: ``[expert-parallel rank]`` selected experts.
        """
        layout, total = self._layout, self._num_others
        if layout.is_optimizer_distributed or layout.sharding is not Sharding.ADAPTIVE:
            return [count * self._bytes for count in owned_others(total, layout)]
        # Like strategy.py, which takes whole experts for the part of them that each rank saves.
        loads = [counts[rank % layout.ep] * self._unit_bytes for rank in range(layout.dp)]
        shares = adaptive_shares(total * self._bytes, loads)
        ends = [share // self._bytes for share in accumulate(shares, initial=0)]
        return [(end - start) * self._bytes for start, end in pairwise(ends)]

    def automatic_k(self, budget_bytes: float) -> int:
        """Return the largest k that every rank would vote for; see `SavedModel.automatic_k`."""
        experts = self._experts
        if not experts.num_layers:
            return experts.num_experts
        room = budget_bytes - max(self._always_bytes()) - max(self._others([0] * experts.ep_size))
        fitting = (
            k
            for k in range(1, experts.num_experts + 1)
            if sequential_bottleneck(experts, k) * self._unit_bytes <= room
        )
        return max(fitting, default=1)

    def memory_shares(self, k: int | None) -> Iterator[MemoryShare]:
        """Yield what the checkpoints of the heaviest rank of each group take."""
        experts, always = self._experts, self._always_bytes()
        others = self._most_others(experts.num_experts if k is None else k)
        for group, owned in enumerate(self._owned):
            by_layer = np.count_nonzero(owned, axis=1)
            num_units = int(by_layer.sum())
            most = num_units if k is None else int(np.minimum(by_layer, k).sum())
            slot = slot_bytes(int(owned.max(initial=0)), self._num_rotating)
            ranks = others[group * experts.ep_size : (group + 1) * experts.ep_size]
            yield MemoryShare(
                region_bytes=always[group] + max(ranks),
                pool_bytes=num_slots(num_units, most) * slot,
            )

    def _most_others(self, k: int) -> list[int]:
        """Return ``[rank]`` the most bytes of what is no expert in any snapshot."""
        experts, cursors = self._experts, self._experts.first_cursors(k)
        found = [self._others([0] * experts.ep_size)]
        for _ in range(experts.num_experts // math.gcd(experts.num_experts, k)):
            found.append(self._others(rank_counts(experts, select_sequential(experts, cursors, k))))
            cursors = advance(experts, cursors, k)
        return [max(of_rank) for of_rank in zip(*found, strict=True)]


def largest_hidden_k(
    workload_of: Callable[[int], Workload], num_experts: int, budget_bytes: float
) -> int:
    """Return a k whose snapshots end while the next iteration runs forward and backward.

    Args:
        budget_bytes: that each rank can copy in that time.

    Returns:
        k such that k + 1 does not fit, 0 if not even one expert per layer is hidden. The bottleneck
        grows with k, except for a few bytes that depend on where snapshots begin.

    Source: MoC-System, section 5.3.
    """
    return bisect_right(
        range(1, num_experts + 1), budget_bytes, key=lambda k: workload_of(k).bottleneck_bytes
    )
