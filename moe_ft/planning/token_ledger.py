"""The tokens of a stage's experts during a run: routed, lost by recoveries, incorporated in the state."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_ft.planning.experts import Counts, Expert
from moe_ft.planning.lost_tokens import Gaps, gaps_after, num_lost, num_new, plt

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


class TokenLedger:
    """Owned by the training thread.

    Attributes:
        layers: names of the stage's MoE layers, in the order of the counts.
        routed: ``[layer, expert]`` tokens so far; replaced, never changed.
        lost: those of them whose updates recoveries have dropped.
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
        self.routed, self.lost = np.zeros(self._shape, np.int64), np.zeros(self._shape, np.int64)
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
        nothing = (0,) * self._shape[1]
        rows = [routed.get(layer, nothing) for layer in self.layers]
        self.routed = np.array(rows, np.int64).reshape(self._shape)
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

    def by_layer(self, counts: Counts) -> dict[str, tuple[int, ...]]:
        """Return ``[layer, expert]`` counts as ``[expert]`` by layer name."""
        return {layer: tuple(counts[index].tolist()) for index, layer in enumerate(self.layers)}


def job_plt(by_layer: Mapping[str, Sequence[int]], tokens: int) -> tuple[int, float]:
    """Return lost tokens and PLT of a whole job from the lost tokens ``[expert]`` of all its layers."""
    rows = [sum(counts) for counts in by_layer.values()]
    return sum(rows), plt(np.array(rows, np.int64).reshape(-1, 1), tokens)
