"""Length of sparse windows: fixed, or the shortest whose snapshots cost no time, measured while training."""

from collections.abc import Callable
from typing import Any

from moe_ft.strategies.sparse.config import SparseConfig

_SHRINK_MARGIN = 0.9  # a shorter window must fit with some room, or the length would swing


class WindowLength:
    """Owned by the strategy. `now` is equal on all ranks of the job.

    Attributes:
        is_auto: whether `now` may change.
        budget_bytes: that a snapshot of this rank may have to cost no time; None until measured.
    """

    def __init__(self, options: SparseConfig, num_positions: int, *, saves_nothing: bool) -> None:
        """Begin with the fixed length, or the longest.

        Args:
            saves_nothing: whether this rank has nothing to save, and so will never measure anything.
        """
        fixed = options.window_snapshots
        self._longest_possible = options.max_window
        self.longest = max(1, min(options.max_window, num_positions))
        self.is_auto = fixed is None
        self.now = fixed or self.longest
        self.budget_bytes: int | None = None
        self._measured_for: Any = None  # order and length when the wanted length was chosen
        self._wanted = 1 if saves_nothing else self.now

    @property
    def limits(self) -> tuple[int, int]:
        """The shortest and the longest window that there may be."""
        return (1, self.longest) if self.is_auto else (self.now, self.now)

    def measure(self, budget_bytes: int, order: int, largest: Callable[[int], int]) -> None:
        """Choose the shortest window whose snapshots of this rank fit into a budget.

        Args:
            largest: returns the bytes of this rank's largest snapshot in windows of a length.
        """
        measured_for = order, self.now
        has_moved = self.budget_bytes is None or _has_changed(budget_bytes, self.budget_bytes)
        if has_moved or measured_for != self._measured_for:
            self.budget_bytes, self._measured_for = budget_bytes, measured_for
            wanted = self._shortest(budget_bytes, largest)
            if wanted < self.now:
                roomy = self._shortest(int(budget_bytes * _SHRINK_MARGIN), largest)
                wanted = min(self.now, roomy)
            self._wanted = wanted

    def _shortest(self, budget_bytes: int, largest: Callable[[int], int]) -> int:
        for length in range(1, self.longest):
            if largest(length) <= budget_bytes:
                return length
        return self.longest

    def values(self) -> list[int]:
        """Return the length that this rank wants, negated: the longest that a rank wants is taken.

        Nothing if the length is fixed.
        """
        return [-self._wanted] if self.is_auto else []

    def agree(self, values: list[int]) -> bool:
        """Take the longest window that a rank wants; return whether that is another one."""
        if not values:
            return False
        before, self.now = self.now, -values[0]
        return self.now != before

    def resume(self, window: int) -> None:
        """Begin with the window of the run that is continued, if the length is automatic.

        One snapshot may be a whole state that was taken for storage, and says nothing of the length.
        """
        if self.is_auto and window > 1:
            self.now = min(window, self._longest_possible)
            self._wanted = min(self._wanted, self.now)


def _has_changed(budget: int, planned: int, tolerance: float = 0.05) -> bool:
    return abs(budget - planned) > tolerance * min(budget, planned)
