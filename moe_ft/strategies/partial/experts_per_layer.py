"""The number k of experts per layer in each snapshot and each checkpoint, and how it changes during a run.

It is fixed or automatic (as many as forward and backward hide; MoC-System, section 5.3). Dynamic-K may double
it after a recovery, by the rule in planning/lost_tokens.py.
"""

from dataclasses import dataclass

from moe_ft.format.records import ExpertProgress
from moe_ft.planning.lost_tokens import expected_plt, next_k
from moe_ft.strategies.partial.config import PartialConfig

_SNAPSHOTS_BETWEEN_CHANGES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """Plan of the whole run.

    Attributes:
        interval: iterations between snapshots, None for automatic.
        planned_tokens: tokens times top-k that a layer processes in the whole run.
        tokens_per_iteration: tokens times top-k of an iteration, on average.
        takes_whole: whether some snapshots hold all experts (--moe-ft-persist-dense-interval).
    """

    interval: int | None
    planned_tokens: int
    tokens_per_iteration: int
    takes_whole: bool = False


class ExpertsPerLayer:
    """Owned by the strategy. All ranks of the job make the same changes.

    Attributes:
        snapshot, persist: experts of each layer in a snapshot, and of them in a checkpoint on storage.
        least: below which an automatic `snapshot` does not fall.
        may_grow: whether `snapshot` may become larger than it is.
    """

    def __init__(self, options: PartialConfig, run: PlannedRun, num_experts: int) -> None:
        self._options, self._run, self._num_experts = options, run, num_experts
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
        self.snapshot, self._num_snapshots = k, 0

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
        self.least, self.persist = raised, min(factor * self.persist, self._num_experts)
        self._set(raised)
        return True
