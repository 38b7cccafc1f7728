"""Popularity of the experts, the rule by which it has changed enough to reorder, and the order that follows.

Popular experts are saved last in a sparse window: in a recovery they stay frozen the longest, which saves
the most work (MoEvement, section 3.5; other measures are in its Appendix B). Its capacity-aware measure is
for experts of different capacities, which Megatron does not have: divided by one capacity, counts have the
order that they have anyway. How the order is divided among snapshots is windows.py.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]  # [layer, expert]

MEASURES = ("count", "soft-count", "decayed")


class Popularity:
    """The popularity of the experts of a stage so far. Owned by one strategy.

    Popularity depends on what was added and in which order, and on nothing else: ranks that add the same
    numbers have the same scores to the bit.

    - count: tokens since `restart`.
    - soft-count: probabilities of the whole gate since `restart`, summed over all tokens.
    - decayed: after each iteration ``decay x score + (1 - decay) x tokens``.
    """

    def __init__(self, measure: str, decay: float) -> None:
        """Begin with nothing counted.

        Args:
            decay: alpha of "decayed", at least 0 and less than 1; other measures ignore it.
        """
        self._decay = decay if measure == "decayed" else None
        self._total: Scores | None = None

    def add(self, counts: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> None:
        """Note what the experts got in an iteration.

        Args:
            counts: ``[layer, expert]`` tokens; for "soft-count" probabilities, summed over tokens.
        """
        total = np.zeros(counts.shape) if self._total is None else self._total
        if self._decay is None:
            self._total = total + counts
        else:
            self._total = self._decay * total + (1 - self._decay) * counts

    @property
    def has_counts(self) -> bool:
        """True if some expert has been used since counting began; until then all are equally popular."""
        return self._total is not None and bool(self._total.any())

    def scores(self) -> Scores:
        """Return ``[layer, expert]`` popularity; its unit depends on the measure."""
        assert self._total is not None, "something was counted"
        return self._total.copy()

    def frequencies(self) -> Scores:
        """Return ``[layer, expert]`` the scores as fractions of their layer."""
        return fractions_of_layers(self.scores())

    def restart(self) -> None:
        """Begin to count again, because the order was changed; "decayed" continues."""
        if self._decay is None and self._total is not None:
            self._total = np.zeros_like(self._total)


def fractions_of_layers(scores: Scores) -> Scores:
    """Return scores as fractions of their layer, equal ones where a layer has none.

    Args:
        scores: ``[layer, expert]``, not negative.
    """
    totals = scores.sum(axis=1, keepdims=True)
    equal = np.full_like(scores, 1 / max(1, scores.shape[1]), dtype=np.float64)
    return np.divide(scores, totals, out=equal, where=totals > 0)


def has_moved(before: Scores, now: Scores, *, change: float = 0.10, fraction: float = 0.25) -> bool:
    """Return whether popularity differs enough from what the order was made for (MoEvement, section 3.5).

    Args:
        before: ``[layer, expert]`` frequencies when the order was made.
        change: an expert has changed if its frequency differs by more than this, relative to before. One
            that was at 0 has changed if it is not any more.
        fraction: of all experts of the stage that must have changed, at least.
    """
    has_changed = np.abs(now - before) > change * before
    return has_changed.size > 0 and bool(has_changed.mean() >= fraction)


def order_experts(scores: Scores, experts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Order experts from the least popular to the most popular, compared by their fraction of their layer.

    Args:
        scores: ``[layer, expert]`` of the stage, not negative.
        experts: those of one expert-parallel rank, as (index of the layer, expert). Equally popular ones
            are ordered by that.
    """
    fractions = fractions_of_layers(scores).tolist()
    return sorted(experts, key=lambda expert: (fractions[expert[0]][expert[1]], expert))
