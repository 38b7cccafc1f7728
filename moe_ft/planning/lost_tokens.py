"""Losses of a lossy recovery: tokens per expert, PLT, and the rule that raises k (MoC-System, eq. 7, 5.3).

The tokens that are routed to an expert are numbered in the order of the iterations that training has kept.
Every expert, in the live state and in each saved version, carries the number of its tokens so far and its
gaps: the ranges of tokens whose updates recoveries have dropped. A recovery that gives an expert a version
from before the iteration that training goes back to makes a gap. Tokens after that iteration get new numbers:
they are trained again and not lost, even if an earlier recovery had lost them. `TokenLedger` counts them for
the experts of a stage during a run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_ft.format.records import Gaps
from moe_ft.planning.experts import Counts, Expert

MAX_GAPS = 32
BOOST_ITERATIONS = 500


def gaps_after(routed: int, version_routed: int, version_gaps: Gaps) -> Gaps:
    """Return the gaps of an expert after a recovery.

    Args:
        routed: tokens up to the iteration that training goes back to.
        version_routed: tokens of the version that the expert gets.
        version_gaps: what this version lacks.

    Returns:
        At most MAX_GAPS; the oldest are put together, with as many tokens as they had.
    """
    gaps = [(start, min(end, routed)) for start, end in version_gaps if start < routed]
    if version_routed < routed:
        if gaps and gaps[-1][1] == version_routed:
            version_routed = gaps.pop()[0]
        gaps.append((version_routed, routed))
    while len(gaps) > MAX_GAPS:
        first, second = gaps[:2]
        gaps[:2] = [(second[0] - (first[1] - first[0]), second[1])]
    return tuple(gaps)


def num_lost(gaps: Gaps) -> int:
    """Return the tokens in gaps."""
    return sum(end - start for start, end in gaps)


def num_new(gaps: Gaps, before: Gaps) -> int:
    """Return the tokens in gaps that were in none before."""
    known = sum(
        max(0, min(end, other_end) - max(start, other_start))
        for start, end in gaps
        for other_start, other_end in before
    )
    return num_lost(gaps) - known


def plt(lost: Counts, planned_tokens: int) -> float:
    """Return the proportion of lost tokens: the mean over MoE layers (MoC-System, eq. 7).

    Layers that predict further tokens (MTP) are MoE layers as all others. One that --mtp-use-repeated-layer
    runs once per depth gets, and may lose, so many times the tokens, and its share is so many times larger.

    Args:
        lost: ``[layer, expert]``; the layers may be those of several stages.
        planned_tokens: tokens times top-k, which every layer processes in the whole planned run.

    Returns:
        A fraction, 0 if nothing is planned.
    """
    if planned_tokens == 0 or lost.shape[0] == 0:
        return 0.0
    return float(lost.sum()) / int(lost.shape[0]) / planned_tokens


def expected_plt(
    num_experts: int, k: int, interval: int, tokens_per_iteration: int, planned_tokens: int
) -> float:
    """Return what the next fault will lose on average with uniform routing and sequential selection.

    When a fault comes, the versions of the N experts are 0, 1, ..., N/k - 1 snapshots old.

    Args:
        planned_tokens: tokens times top-k that the result is a fraction of.
    """
    if planned_tokens <= 0:
        return 0.0
    lost_iterations = interval * (num_experts / k - 1) / 2
    return lost_iterations * tokens_per_iteration / planned_tokens


def limit_of_k(k: int, num_experts: int, limit: float) -> float:
    """Return up to which PLT of the whole run k is kept; the values of k have equal shares of the limit.

    Doubling leads from 1 to N in n = ceil(log2 N) steps, so n values of k lose tokens. The i-th of them may
    take the PLT to i/n of the limit: what the ones before have left of their shares is not lost to it.

    Args:
        k: experts of a layer in each snapshot, at least 1.
    """
    num_steps, num_left = _num_doublings(1, num_experts), _num_doublings(k, num_experts)
    return limit * ((num_steps - num_left + 1) / max(1, num_steps))  # never above the limit itself


def _num_doublings(k: int, num_experts: int) -> int:
    """Return how often k must be doubled to be all experts."""
    return (-(-num_experts // k) - 1).bit_length()


def next_k(
    k: int,
    num_experts: int,
    accumulated_plt: float,
    last_plt: float,
    expected: Callable[[int], float],
    limit: float,
) -> int:
    """Return k after a recovery: doubled until one more fault keeps the PLT below what k may take it to.

    Dynamic-K (MoC-System, 5.3.3): "If the aggregated PLT attributable to a specific K surpasses its limit, K
    will be doubled, and this process is reiterated until checkpointing all experts." The limit of each K is
    not printed; ours is `limit_of_k`. PLT is that of the whole planned run: of the tokens so far, a failure
    early in a run loses a large proportion, whatever K is. The loss of one more fault is looked ahead to,
    because k can only be raised after it.

    Args:
        accumulated_plt: by all recoveries, of the whole planned run.
        last_plt: by the last one. The next is expected to lose as much if that is more than `expected`, as it
            is with skewed routing or where memory was lost with a node.
        expected: returns for a k what one more fault loses, see `expected_plt`.
    """
    excess = max(1.0, last_plt / expected(k)) if expected(k) > 0 else 1.0
    while k < num_experts:
        if accumulated_plt + excess * expected(k) <= limit_of_k(k, num_experts, limit):
            break
        k = min(2 * k, num_experts)
    return k


NEVER = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitVersion:
    """Version of a unit, in memory or on storage: its iteration, its routed tokens and its gaps."""

    iteration: int
    routed_tokens: int
    gaps: Gaps = ()


_FIRST = UnitVersion(iteration=NEVER, routed_tokens=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Cost of a recovery for the experts of a stage, by layer name.

    Attributes:
        lost: ``[expert]`` tokens whose updates were dropped and had not been before.
        repeated: ``[expert]`` tokens that experts from beyond the iteration are trained with again.
        accumulated: ``[expert]`` lost by this and earlier recoveries.
    """

    lost: Mapping[str, tuple[int, ...]]
    repeated: Mapping[str, tuple[int, ...]]
    accumulated: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Debts:
    """Tokens that experts of a stage are to get above their capacity, in the place of lost ones.

    Source: MoEtion, capacity boost.

    Attributes:
        tokens: ``[layer, expert]`` that are not made up yet.
        num_left: iterations in which that may still happen; 0 once it is over.
    """

    tokens: Counts
    num_left: int = 0

    @property
    def num_open(self) -> int:
        """Number of tokens that may still be made up."""
        return int(self.tokens.sum()) if self.num_left else 0

    def paid(self, made_up: Counts) -> "Debts":
        """Return what is owed after an iteration with these tokens above the capacity."""
        if not self.num_left:
            return self
        left = np.maximum(0, self.tokens - made_up)
        return Debts(tokens=left, num_left=self.num_left - 1 if left.any() else 0)

    def owing(self, lost: Counts) -> "Debts":
        """Return what is owed after a recovery; what was given up stays so."""
        if not lost.any():
            return self
        open_tokens = self.tokens if self.num_left else 0
        return Debts(tokens=np.asarray(open_tokens + lost), num_left=BOOST_ITERATIONS)


class TokenLedger:
    """Owned by the training thread.

    Attributes:
        layers: names of the stage's MoE layers, in the order of the counts.
        routed: ``[layer, expert]`` tokens so far; replaced, never changed.
        gaps: the same as ranges, ``[expert]`` by layer name.
    """

    def __init__(
        self, layers: Sequence[str], num_experts: int, frozen: Collection[Expert] = ()
    ) -> None:
        """Make the ledger of a run that begins.

        Args:
            frozen: experts that are not trained, and so lose nothing.
        """
        self.layers = tuple(layers)
        self._shape = (len(self.layers), num_experts)
        self.routed = np.zeros(self._shape, np.int64)
        self.lost = np.zeros(self._shape, np.int64)
        self.gaps: dict[str, tuple[Gaps, ...]] = {layer: ((),) * num_experts for layer in layers}
        self._is_trained = np.array(
            [[(layer, expert) not in frozen for expert in range(num_experts)] for layer in layers],
            np.int64,
        ).reshape(self._shape)

    @property
    def trained(self) -> Counts:
        """``[layer, expert]`` tokens whose updates the live state incorporates."""
        return np.asarray(self.routed - self.lost)

    def add(self, counts: Counts) -> None:
        """Note the ``[layer, expert]`` tokens of an iteration."""
        self.routed = self.after(self.routed, counts)

    def after(self, routed: Counts, counts: Counts) -> Counts:
        """Return ``[layer, expert]`` routed tokens after an iteration with these counts. Any thread."""
        return np.asarray(routed + counts * self._is_trained)

    def recover(
        self,
        routed: Mapping[str, Sequence[int]],
        restored: Mapping[Expert, UnitVersion],
        gaps_before: Mapping[str, Sequence[Gaps]],
    ) -> Loss:
        """Continue from a recovered state.

        Args:
            routed: ``[expert]`` tokens of the state by layer name.
            restored: the versions that the experts get; one that is not there gets the first state.
            gaps_before: ``[expert]`` by layer name, of the newest state that is known.
        """
        self.routed = self.table(routed)
        lost, repeated = np.zeros_like(self.routed), np.zeros_like(self.routed)
        for index, layer in enumerate(self.layers):
            gaps = []
            for expert, count in enumerate(self.routed[index].tolist()):
                version = restored.get((layer, expert), _FIRST)
                gaps.append(gaps_after(count, version.routed_tokens, version.gaps))
                before = gaps_before[layer][expert] if layer in gaps_before else ()
                lost[index, expert] = num_new(gaps[-1], before)
                repeated[index, expert] = max(0, version.routed_tokens - count)
                self.lost[index, expert] = num_lost(gaps[-1])
            self.gaps[layer] = tuple(gaps)
        return Loss(
            lost=self.by_layer(lost),
            repeated=self.by_layer(repeated),
            accumulated=self.by_layer(self.lost),
        )

    def tables(self, versions: Mapping[Expert, UnitVersion]) -> tuple[Counts, Counts]:
        """Return the tokens whose updates versions incorporate, and their iterations."""
        trained = np.zeros(self._shape, np.int64)
        iterations = np.full(self._shape, NEVER, np.int64)
        for index, layer in enumerate(self.layers):
            for expert in range(self._shape[1]):
                if (version := versions.get((layer, expert))) is not None:
                    trained[index, expert] = version.routed_tokens - num_lost(version.gaps)
                    iterations[index, expert] = version.iteration
        return trained, iterations

    def table(self, by_layer: Mapping[str, Sequence[int]]) -> Counts:
        """Return ``[expert]`` counts by layer name as ``[layer, expert]``, 0 where there are none."""
        nothing = (0,) * self._shape[1]
        rows = [by_layer.get(layer, nothing) for layer in self.layers]
        return np.array(rows, np.int64).reshape(self._shape)

    def by_layer(self, counts: Counts) -> dict[str, tuple[int, ...]]:
        """Return ``[layer, expert]`` counts as ``[expert]`` by layer name."""
        return {layer: tuple(counts[index].tolist()) for index, layer in enumerate(self.layers)}


def job_plt(by_layer: Mapping[str, Sequence[int]], tokens: int) -> tuple[int, float]:
    """Return lost tokens and PLT of a whole job from the lost tokens ``[expert]`` of all its layers."""
    rows = [sum(counts) for counts in by_layer.values()]
    return sum(rows), plt(np.array(rows, np.int64).reshape(-1, 1), tokens)
