"""Options of the strategy `partial`, and its selection of experts: sequential and load-aware.

Everything is about the experts of one pipeline stage, whose ranks all choose the same (MoC-System, section
3.2). `RankShare` says how replicated state is divided by what else each rank of the stage saves.
`ExpertsPerLayer` is their number k, fixed or automatic (as many as forward and backward hide; MoC-System,
section 5.3). Dynamic-K may double it after a recovery, by the rule in planning/lost_tokens.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, override

import numpy as np

from moe_ft.config.fields import Bounds, ConfigPart, setting
from moe_ft.errors import ConfigError
from moe_ft.format.records import ExpertProgress
from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.planning.lost_tokens import expected_plt, next_k
from moe_ft.planning.sharding import adaptive_shares
from moe_ft.strategies.rotating import PlannedRun, Selection


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialConfig(ConfigPart):
    """Partial experts checkpointing: which experts a snapshot holds."""

    TITLE: ClassVar[str] = "strategy partial"
    PAGE: ClassVar[str] = "partial.md"
    k_snapshot: str = setting(
        "auto",
        "experts per MoE layer in each snapshot; auto = as many as can be copied while forward and "
        "backward run",
        metavar="{N,auto}",
        bounds=Bounds(at_least=1),
    )
    k_persist: int = setting(
        1,
        "experts per MoE layer that each checkpoint writes to storage",
        metavar="N",
        bounds=Bounds(at_least=1),
        reason="an expert that never goes to storage is lost with its node",
        remedy="Give a number of experts per MoE layer",
        needs=("persist_dir",),
    )
    selection: str = setting(
        "sequential",
        "which experts: one after the other, or those with the most unsaved tokens",
        choices=("sequential", "load-aware"),
    )
    master_always_full: bool = setting(
        False, "save the fp32 master weights of all experts in every snapshot"
    )
    dynamic_k: bool = setting(
        False,
        "double k after a recovery if one more could take the proportion of lost tokens past the share of "
        "--moe-ft-plt-limit that this k has",
    )
    plt_limit: float = setting(
        0.0375,
        "proportion of the planned tokens that may be lost, as --moe-ft-dynamic-k tries to keep it",
        bounds=Bounds(above=0, below=1),
        remedy="Write 0.0375 for 3.75 percent",
        needs=("dynamic_k",),
        metavar="FRACTION",
        page="lost_tokens.md",
    )

    @property
    def k_in_memory(self) -> int | None:
        """The experts in a snapshot, None for automatic; raises ConfigError if it is neither."""
        return self.number_or_auto("k_snapshot")

    @property
    def is_load_aware(self) -> bool:
        """True if experts are selected by their unsaved tokens, and not in turn."""
        return self.selection == "load-aware"

    @override
    def check(self, world_size: int) -> None:
        k_snapshot = self.k_in_memory
        if k_snapshot is not None and self.k_persist > k_snapshot:
            raise ConfigError(
                f"--moe-ft-k-persist={self.k_persist} must be at most --moe-ft-k-snapshot={k_snapshot}: "
                "storage is fed from what snapshots hold. Lower the first or raise the second."
            )


_SNAPSHOTS_BETWEEN_CHANGES = 10


def select_sequential(experts: ExpertLayout, cursors: Sequence[int], k: int) -> Selection:
    """Take the next k experts of every layer in the interleaved order.

    Args:
        cursors: ``[layer]`` positions where the layers continue; see `advance`.
    """
    return tuple(
        tuple(sorted(experts.expert_at(cursor + step) for step in range(k))) for cursor in cursors
    )


def advance(experts: ExpertLayout, cursors: Sequence[int], k: int) -> tuple[int, ...]:
    """Return the positions where the layers continue after k experts of each."""
    return tuple((cursor + k) % experts.num_experts for cursor in cursors)


def select_load_aware(
    experts: ExpertLayout, cursors: Sequence[int], unsaved: Counts, k: int
) -> Selection:
    """Take the k experts of every layer with the most unsaved updates.

    Args:
        cursors: ``[layer]`` positions; among equals the next from there in the interleaved order.
        unsaved: ``[layer, expert]`` tokens that an expert has been trained with since it was last saved.
    """
    return select_by_keys(experts, cursors, [-unsaved], k)


def select_by_keys(
    experts: ExpertLayout, cursors: Sequence[int], keys: Sequence[Counts], k: int
) -> Selection:
    """Take the k experts of every layer with the least keys.

    Args:
        cursors: ``[layer]`` positions; among equals the next from there in the interleaved order.
        keys: ``[layer, expert]`` each, the most important first.
    """
    steps = np.arange(experts.num_experts)
    positions = (np.array(cursors, np.int64).reshape(-1, 1) + steps) % experts.num_experts
    candidates = positions % experts.ep_size * experts.num_local + positions // experts.ep_size
    # lexsort sorts by its last key first and is stable: candidates keep their order if equal.
    ranking = np.lexsort([np.take_along_axis(key, candidates, 1) for key in reversed(keys)])
    chosen = np.sort(np.take_along_axis(candidates, ranking[:, :k], 1), axis=1)
    return tuple(tuple(layer) for layer in chosen.tolist())


def rank_counts(experts: ExpertLayout, selection: Selection) -> list[int]:
    """Return ``[expert-parallel rank]`` how many selected experts each holds."""
    counts = [0] * experts.ep_size
    for layer in selection:
        for expert in layer:
            counts[experts.rank_of(expert)] += 1
    return counts


def fill_up(experts: ExpertLayout, cursors: Sequence[int], selection: Selection) -> Selection:
    """Raise k on ranks that have room, without raising the bottleneck rank (MoC-System, section 5.3).

    Every rank takes as many experts as the rank that has the most, the next ones in the interleaved order.

    Args:
        cursors: ``[layer]`` positions after the selection.
    """
    counts = rank_counts(experts, selection)
    most = max(counts, default=0)
    extended = [set(layer) for layer in selection]
    for step in range(experts.num_experts):
        for layer, cursor in enumerate(cursors):
            expert = experts.expert_at(cursor + step)
            rank = experts.rank_of(expert)
            if counts[rank] < most and expert not in extended[layer]:
                extended[layer].add(expert)
                counts[rank] += 1
    return tuple(tuple(sorted(layer)) for layer in extended)


def most_on_a_rank(experts: ExpertLayout, k: int) -> int:
    """Return how many experts a rank saves at most, whatever is selected."""
    return experts.num_layers * min(k, experts.num_local)


def sequential_bottleneck(experts: ExpertLayout, k: int) -> int:
    """Return the most experts that a rank saves in a snapshot with sequential selection.

    All layers together take consecutive positions of the interleaved order.
    """
    return -(-experts.num_layers * k // experts.ep_size)


def select_to_persist(
    experts: ExpertLayout,
    cursors: Sequence[int],
    saved_at: Counts,
    persisted_at: Counts,
    unpersisted: Counts | None,
    k: int,
) -> Selection:
    """Choose which of the experts' versions in memory go to storage.

    Sequentially: the expert whose version on storage is the oldest, among equals the one whose version
    in memory is the newest. Choosing only among the experts of the snapshot that happens to be written
    could leave some out forever, where the rotations of snapshots and of persists share a factor.

    Args:
        cursors: ``[layer]`` positions for what is equal otherwise.
        saved_at: ``[layer, expert]`` iteration of the version in memory, -1 if there is none.
        persisted_at: likewise on storage. An expert whose version is there already is not chosen.
        unpersisted: ``[layer, expert]`` tokens that the version in memory has more than the one on
            storage, for load-aware choice; None for sequential.
    """
    has_nothing_new = (saved_at <= persisted_at).astype(np.int64)
    by_age = [persisted_at, -saved_at]
    keys = [has_nothing_new, *([-unpersisted] if unpersisted is not None else []), *by_age]
    return tuple(
        tuple(expert for expert in layer if not has_nothing_new[index, expert])
        for index, layer in enumerate(select_by_keys(experts, cursors, keys, k))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """Bytes that a rank of the stage saves, and the ranks that share replicated state with it.

    Attributes:
        always_bytes: that every snapshot of this rank holds.
        unit_bytes: of the largest rotating unit of the stage.
        replicated_bytes: state that all data-parallel ranks have and that adaptive sharding divides for each
            snapshot; 0 for a division that stays.
        ep_ranks: ``[data-parallel rank]`` its expert-parallel rank.
    """

    always_bytes: int
    unit_bytes: int
    replicated_bytes: int = 0
    ep_ranks: tuple[int, ...] = ()

    def divide(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shares for ``[expert-parallel rank]`` selected experts, None for those of the start."""
        if not self.replicated_bytes:
            return None
        loads = [counts[ep_rank] * self.unit_bytes for ep_rank in self.ep_ranks]
        return tuple(adaptive_shares(self.replicated_bytes, loads))

    def possible(
        self, experts: ExpertLayout, possible_k: Sequence[int]
    ) -> list[tuple[int, ...] | None]:
        """Return each division that snapshots will need.

        All layers together take consecutive places around the expert-parallel ranks, so only the rank at
        which they begin matters.

        Args:
            possible_k: experts per layer in a snapshot; empty for automatic k, where ranks with room take as
                many as the others.
        """
        divisions = dict.fromkeys([None, self.divide([0] * experts.ep_size)])
        for k in possible_k:
            least, num_more = divmod(experts.num_layers * k, experts.ep_size)
            for start in range(experts.ep_size):
                counts = [
                    least + ((rank - start) % experts.ep_size < num_more)
                    for rank in range(experts.ep_size)
                ]
                divisions[self.divide(counts)] = None
        return list(divisions)


class ExpertsPerLayer:
    """Owned by the strategy. All ranks of the job make the same changes.

    Attributes:
        snapshot, persist: experts of each layer in a snapshot, and of them in a checkpoint on storage.
        least: below which an automatic `snapshot` does not fall.
        may_grow: whether `snapshot` may become larger than it is.
    """

    def __init__(self, options: PartialConfig, run: PlannedRun, num_experts: int) -> None:
        self._options = options
        self._run = run
        self._num_experts = num_experts
        self.is_auto = options.k_in_memory is None
        self.may_grow = self.is_auto or options.dynamic_k
        self.snapshot = options.k_in_memory or 1
        self.persist = min(options.k_persist, num_experts)
        self.least = 1
        self._num_snapshots = 0  # since the last change

    def possible(self) -> list[int]:
        """Return the values of `snapshot` that a run with a fixed number may come to."""
        most = self._num_experts
        doubled = [self.snapshot * 2**power for power in range(most.bit_length())]
        return [min(k, most) for k in doubled] if self._options.dynamic_k else [self.snapshot]

    def note_snapshot(self) -> None:
        """Note that a snapshot is complete."""
        self._num_snapshots += 1

    def agree(self, hidden: int) -> bool:
        """Take what training hides on all ranks, not more often than every few snapshots.

        Args:
            hidden: the least over all ranks, 0 if some have not measured it.

        Returns:
            Whether `snapshot` has changed.
        """
        if hidden == 0 or self._num_snapshots < _SNAPSHOTS_BETWEEN_CHANGES:
            return False
        k = max(hidden, self.least)
        if k == self.snapshot:
            return False
        self._set(k)
        return True

    def _set(self, k: int) -> None:
        self.snapshot = k
        self._num_snapshots = 0

    def resume(self, progress: ExpertProgress) -> None:
        """Continue with what the recovered state had, where that may change at all."""
        if self._options.dynamic_k:
            self.persist = max(self.persist, progress.k_persist)
            self.least = progress.least_k
            self._set(max(self.snapshot, progress.k_snapshot))
        elif self.is_auto:
            self._set(progress.k_snapshot)

    def raise_for(self, accumulated_plt: float, last_plt: float, interval: int) -> bool:
        """Double k where one more fault could take the PLT past the limit of k (Dynamic-K, see `next_k`).

        Args:
            accumulated_plt: of the whole job and the whole planned run, by all recoveries.
            last_plt: likewise, by the last one.

        Returns:
            Whether `snapshot` has changed.
        """
        if not self._options.dynamic_k:
            return False
        run = (interval, self._run.tokens_per_iteration, self._run.planned_tokens)
        raised = next_k(
            self.snapshot,
            self._num_experts,
            accumulated_plt,
            last_plt,
            lambda k: expected_plt(self._num_experts, k, *run),
            self._options.plt_limit,
        )
        if raised == self.snapshot:
            return False
        factor = -(-raised // self.snapshot)
        self.least = raised
        self.persist = min(factor * self.persist, self._num_experts)
        self._set(raised)
        return True
