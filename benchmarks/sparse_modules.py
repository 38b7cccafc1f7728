"""Work that a conversion skips where experts freeze only as whole modules, as with grouped GEMM.

Transformer Engine computes the weight gradients of all experts that a rank has of a layer, or of none. Three
ways to divide a stage into groups are played back on a routing trace: in the order of single experts, in the
order of modules (what the strategy does, sparse/positions.py), and with whole modules only. Experts only,
all of one size, as in benchmarks/sparse_orders.py.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.sparse_orders import WINDOWS, Row, Tokens
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.strategies.sparse.popularity import fractions_of_layers
from moe_ft.strategies.sparse.positions import RankUnits, StageOrder, StageUnits
from moe_ft.strategies.sparse.windows import WindowCuts, cut_window, snapshot_bytes
from moe_ft.units import UnitId, UnitKind

NUM_WINDOWS = 25  # of the trace, at equal distances
STAGES = ((24, 16), (24, 8), (24, 4), (6, 8), (6, 4))  # layers, expert-parallel ranks
OWNERS = (1, 2, 4)
# The last: slices end inside of modules, which several owners then share.
CASES = (*itertools.product(STAGES, OWNERS), ((4, 8), 3))
_PARAMETERS = 1000  # of an expert: what owners share is divided to the parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """A stage that is divided for a window.

    Attributes:
        order: of its units.
        cuts: of the window.
    """

    order: StageOrder
    cuts: WindowCuts

    def first_groups(self, num_experts: int, module_size: int) -> npt.NDArray[np.int64]:
        """Return ``[layer, expert]`` the first snapshot that has one of its module at FULL.

        Args:
            num_experts: of a layer of the model.
            module_size: experts that freeze together, 1 where each does alone.
        """
        groups, units = self.cuts.groups(), [*self.order.columns.values()]
        num_layers = 1 + max(unit.layer for column in units for unit in column if unit)
        found = np.zeros((num_layers, num_experts), np.int64)
        for column in units:
            for unit, group in zip(column, groups, strict=True):
                assert unit is not None, "all ranks have as many experts"
                found[unit.layer, unit.expert] = group
        modules = found.reshape(num_layers, -1, module_size).min(axis=2)
        return np.repeat(modules, module_size, axis=1)


class Stage:
    """A stage of a model whose experts are all of one size, on ranks with a distributed optimizer."""

    def __init__(self, num_layers: int, num_experts: int, ep: int, num_owners: int) -> None:
        self.num_layers, self.num_experts, self._ep = num_layers, num_experts, ep
        self.module_size = num_experts // ep
        self._num_owners = num_owners
        self.single = self._units(self.module_size, _PARAMETERS, frozenset())
        layers = frozenset(self._layers)
        self.grouped = self._units(self.module_size, _PARAMETERS, layers)
        # A module is one unit here: nothing can divide it.
        self.whole = self._units(1, _PARAMETERS * self.module_size, frozenset())

    @property
    def _layers(self) -> list[str]:
        return [f"layer.{layer}" for layer in range(self.num_layers)]

    def _units(self, num_local: int, num_parameters: int, grouped: frozenset[str]) -> StageUnits:
        ranks = []
        count = self.num_layers * num_local
        slices = assign_equal_slices([num_parameters] * count, self._num_owners)
        for owner, ep_rank in itertools.product(range(self._num_owners), range(self._ep)):
            units = [
                UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)
                for layer in range(self.num_layers)
                for expert in range(ep_rank * num_local, (ep_rank + 1) * num_local)
            ]
            # Megatron's buffers begin with the last parameter.
            owned = [end - start for start, end in slices[owner]][::-1]
            sizes = {unit: (12 * each, 2 * each) for unit, each in zip(units, owned, strict=True)}
            ranks.append(RankUnits(ep_rank=ep_rank, sizes=sizes, grouped_layers=grouped))
        return StageUnits(ranks, self._layers)

    def divide(self, units: StageUnits, scores: Tokens, length: int) -> Division:
        """Return how a window of so many snapshots is divided."""
        order = units.order(scores)
        return Division(order=order, cuts=cut_window(order.sizes, length))

    def of_modules(self, scores: Tokens) -> Tokens:
        """Return ``[layer, module]`` the popularity of modules."""
        fractions = fractions_of_layers(scores)
        return fractions.reshape(self.num_layers, -1, self.module_size).sum(axis=2)


def skipped(first_groups: npt.NDArray[np.int64], replayed: Tokens) -> float:
    """Return the share of the experts' weight-gradient work that a conversion skips.

    Args:
        first_groups: ``[layer, expert]`` the snapshot until which it is frozen.
        replayed: ``[replay, layer, expert]`` tokens.
    """
    frozen = sum(each[first_groups > replay].sum() for replay, each in enumerate(replayed))
    return float(frozen / replayed.sum())


def module_rows(tokens: Tokens) -> Iterator[Row]:
    """Yield what conversions skip in each case, in %, and what that costs in bytes of a snapshot."""
    for ((num_layers, ep), owners), length in itertools.product(CASES, WINDOWS):
        stage = Stage(num_layers, tokens.shape[2], ep, owners)
        rows = [
            _compare(stage, tokens[:, :num_layers], start, length)
            for start in np.linspace(length, len(tokens) - length, NUM_WINDOWS, dtype=int)
        ]
        single, old, new, larger, whole, whole_larger, more = np.mean(rows, axis=0).tolist()
        name = f"{num_layers} layers, ep {ep}: {stage.module_size}"
        percents = [f"{100 * each:.1f}" for each in (single, old, new)]
        prices = [f"{100 * larger:+.1f}", f"{100 * more:+.1f}"]
        yield (
            name,
            owners,
            length,
            *percents,
            *prices,
            f"{100 * whole:.1f}",
            f"{100 * whole_larger:+.1f}",
        )


def _compare(stage: Stage, tokens: Tokens, start: int, length: int) -> Sequence[float]:
    """Return shares and prices for the window that begins with an iteration."""
    scores, replayed = (
        tokens[start - length : start].sum(axis=0),
        tokens[start + 1 : start + length],
    )
    num_experts, size = stage.num_experts, stage.module_size
    single = stage.divide(stage.single, scores, length)
    grouped = stage.divide(stage.grouped, scores, length)
    whole = stage.divide(stage.whole, stage.of_modules(scores), length)
    of_modules = whole.first_groups(num_experts // size, 1)
    base = single.cuts.largest_bytes
    return (
        skipped(single.first_groups(num_experts, 1), replayed),
        skipped(single.first_groups(num_experts, size), replayed),
        skipped(grouped.first_groups(num_experts, size), replayed),
        grouped.cuts.largest_bytes / base - 1,
        skipped(np.repeat(of_modules, size, axis=1), replayed),
        whole.cuts.largest_bytes / base - 1,
        _window_bytes(grouped) / _window_bytes(single) - 1,
    )


def _window_bytes(division: Division) -> int:
    """Return what the rank that saves the most saves in a window."""
    sizes, ends = division.order.sizes, division.cuts.ends
    return int(snapshot_bytes(sizes, ends).sum(axis=1).max())
