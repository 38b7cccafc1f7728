"""The order in which a stage saves its units in a sparse window, and what each rank saves where. Pure.

A position is one unit of every rank: the k-th experts of the expert-parallel ranks, which have different
ones, or the same unit of all. Windows divide positions (windows.py).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.strategies.interface import UnitSizes
from moe_ft.strategies.sparse.popularity import Scores, fractions_of_layers, order_experts
from moe_ft.strategies.sparse.windows import Bytes, PositionSizes, count_splits
from moe_ft.units import Level, UnitId, UnitKind

_BACK_TO_FRONT = (
    UnitKind.OUTPUT,
    UnitKind.FINAL_NORM,
    UnitKind.OTHER,
    UnitKind.NON_EXPERT,
    UnitKind.EMBEDDING,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUnits:
    """The units of one rank of a stage.

    Attributes:
        sizes: bytes that it saves at FULL and at COMPUTE, by unit; 0 where other ranks save all.
        grouped_layers: whose experts on a rank are one module, and can be frozen only together.
    """

    ep_rank: int
    sizes: Mapping[UnitId, tuple[int, int]]
    grouped_layers: frozenset[str] = frozenset()


def rank_units(ep_rank: int, catalog: UnitSizes, grouped_layers: frozenset[str]) -> RankUnits:
    """Return the units of a rank with their sizes, each tensor aligned as regions are."""
    return RankUnits(
        ep_rank=ep_rank,
        sizes={
            unit: (
                catalog.num_bytes(unit, alignment=ALIGNMENT_BYTES),
                catalog.num_bytes(unit, Level.COMPUTE, alignment=ALIGNMENT_BYTES),
            )
            for unit in catalog.units
        },
        grouped_layers=grouped_layers,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageOrder:
    """An order of the units of a stage.

    Attributes:
        columns: by expert-parallel rank, ``[position]`` its unit; None where other ranks have more experts.
    """

    columns: Mapping[int, tuple[UnitId | None, ...]]
    sizes: PositionSizes


class StageUnits:
    """The units of a stage, to be put in order again and again."""

    def __init__(self, ranks: Sequence[RankUnits], layers: Sequence[str]) -> None:
        """Collect the units.

        Args:
            ranks: ``[rank of the stage]``.
            layers: MoE layers in which experts are trained, in the order of the scores.
        """
        self._num_ranks = len(ranks)
        self._experts = []
        for ep_rank in sorted({each.ep_rank for each in ranks}):
            members = [rank for rank, each in enumerate(ranks) if each.ep_rank == ep_rank]
            own = {unit for rank in members for unit in ranks[rank].sizes}
            units = sorted(unit for unit in own if unit.kind is UnitKind.EXPERT)
            self._experts.append(_Experts(ep_rank, members, units, ranks, layers))
        found = {unit for each in ranks for unit in each.sizes if unit.kind is not UnitKind.EXPERT}
        others = sorted(found, key=from_back_to_front)
        sizes = _sizes_of(ranks, others)
        order = spread_over_ranks(sizes[:, :, 0])
        self._others, self._other_sizes = [others[index] for index in order], sizes[:, order]

    def order(self, scores: Scores) -> StageOrder:
        """Put experts in ascending order of popularity, and everything else after them, back to front.

        Later layers first is MoEvement, Appendix E. Both orders are followed within what each rank owns;
        see `spread_over_ranks`. Experts that are one module stay together; see `order_modules`.

        Args:
            scores: ``[layer, expert]`` popularity.
        """
        most = max(len(each.units) for each in self._experts)
        sizes = np.zeros((self._num_ranks, most, 2), np.int64)
        columns = {}
        modules: list[list[str]] = []
        for each in self._experts:
            order = each.order(scores)
            sizes[np.array(each.members)[:, None], np.arange(len(order))] = each.sizes[:, order]
            padding = [None] * (most - len(order))
            own = [each.units[index] for index in order]
            columns[each.ep_rank] = (*own, *padding, *self._others)
            modules.append([each.modules[index] for index in order])
        both = np.concatenate([sizes, self._other_sizes], axis=1)
        is_grouped = any(each.is_grouped for each in self._experts)
        splits = count_splits(modules, both.shape[1]) if is_grouped else None
        return StageOrder(
            columns=columns,
            sizes=PositionSizes(full=both[:, :, 0], compute=both[:, :, 1], splits=splits),
        )


class _Experts:
    """The experts of one expert-parallel rank, and what the ranks that have them save of each."""

    def __init__(
        self,
        ep_rank: int,
        members: Sequence[int],
        units: Sequence[UnitId],
        ranks: Sequence[RankUnits],
        layers: Sequence[str],
    ) -> None:
        self.ep_rank, self.members, self.units = ep_rank, members, units
        self.sizes = _sizes_of([ranks[rank] for rank in members], units)
        grouped = {layer for rank in members for layer in ranks[rank].grouped_layers}
        self.modules = [
            unit.layer_name if unit.layer_name in grouped else str(unit) for unit in units
        ]
        self.is_grouped = len(set(self.modules)) < len(self.modules)
        numbers = {layer: number for number, layer in enumerate(layers)}
        # Nothing is counted in a layer in which no expert is trained.
        self._places = [
            (numbers[unit.layer_name], unit.expert) if unit.layer_name in numbers else None
            for unit in units
        ]

    def order(self, scores: Scores) -> list[int]:
        """Return the indices of the units in the order in which they are saved."""
        modules = self.modules if self.is_grouped else None
        return order_units(scores, self._places, modules, self.sizes[:, :, 0])


def order_units(
    scores: Scores,
    places: Sequence[tuple[int, int] | None],
    modules: Sequence[Hashable] | None,
    full: Bytes,
) -> list[int]:
    """Put the experts of a rank in ascending order of popularity, within what each of its owners has.

    Args:
        scores: ``[layer, expert]`` popularity.
        places: ``[expert]`` where its score is; None if it has none, then it comes first.
        modules: as of `order_modules`; None if each is a module of its own.
        full: ``[rank, expert]`` bytes at FULL.

    Returns:
        Indices of the experts, in the new order.
    """
    if modules is not None:
        fractions = fractions_of_layers(scores)
        popularity = [-1.0 if place is None else float(fractions[place]) for place in places]
        return order_modules(popularity, modules, full)
    counted = {place: index for index, place in enumerate(places) if place is not None}
    order = [index for index, place in enumerate(places) if place is None]
    order += [counted[place] for place in order_experts(scores, list(counted))]
    return [order[place] for place in spread_over_ranks(full[:, order])]


def order_modules(
    popularity: Sequence[float], modules: Sequence[Hashable], full: Bytes
) -> list[int]:
    """Put experts in ascending order of the popularity of their modules, the experts of one together.

    Transformer Engine computes the weight gradients of all experts of a grouped module or of none, so what
    one expert more saves depends on all of them. A module whose parts several ranks own goes where as much
    lies before it for one as for the other, as far as popularity leaves that open: else its experts would be
    far apart in the merged order of `spread_over_ranks`.

    Args:
        popularity: ``[expert]``, comparable between layers. A module has the mean of its experts', because a
            window is divided by bytes; with equal modules that is the order of the sums.
        modules: ``[expert]`` the module that it belongs to.
        full: ``[rank, expert]`` bytes at FULL.

    Returns:
        Indices of the experts, in the new order.
    """
    members: dict[Hashable, list[int]] = {}
    for index, module in enumerate(modules):
        members.setdefault(module, []).append(index)
    means = [(sum(popularity[each] for each in own) / len(own), own) for own in members.values()]
    ascending = [own for _, own in sorted(means)]
    whole = np.array([full[:, own].sum(axis=1) for own in ascending]).reshape(-1, len(full)).T
    order = [index for place in spread_over_ranks(whole) for index in ascending[place]]
    return [order[place] for place in spread_over_ranks(full[:, order])]


def spread_over_ranks(full: Bytes) -> list[int]:
    """Merge what different ranks own, so that each rank's state is spread over the whole order.

    Data-parallel ranks own slices of a buffer in which whole layers lie end to end. If units stayed in the
    order that is wanted, a group could hold all that one rank owns, whose snapshot then is no smaller than
    a dense one. So a unit goes where as large a fraction of its owner's bytes lies before it as of any other
    owner's. Units of one owner keep their order; with one owner of everything nothing changes.

    Args:
        full: ``[rank, unit]`` bytes at FULL, in the order that is wanted.

    Returns:
        Indices of the units, in the new order.
    """
    num_units = full.shape[1]
    totals = full.sum(axis=1, keepdims=True)
    middles = np.cumsum(full, axis=1) - full / 2
    fractions = np.divide(middles, totals, out=np.zeros(full.shape), where=totals > 0)
    # A unit that several own is where it is for them on average; one that none does stays about in place.
    shares = full.sum(axis=0)
    places = np.divide(
        (full * fractions).sum(axis=0),
        shares,
        out=(np.arange(num_units) + 0.5) / max(1, num_units),
        where=shares > 0,
    )
    # What only rounding tells apart stays in the order that is wanted.
    found: list[int] = np.argsort(places.round(9), kind="stable").tolist()
    return found


def _sizes_of(ranks: Sequence[RankUnits], units: Sequence[UnitId]) -> npt.NDArray[np.int64]:
    """Return ``[rank, unit, level]`` the bytes at FULL and at COMPUTE."""
    sizes = [[each.sizes.get(unit, (0, 0)) for unit in units] for each in ranks]
    return np.array(sizes, dtype=np.int64).reshape(len(ranks), len(units), 2)


def from_back_to_front(unit: UnitId) -> tuple[Any, ...]:
    """Sort units that are no experts: the output first, the embedding last (Appendix E)."""
    kind = UnitKind.NON_EXPERT if unit.layer >= 0 else unit.kind  # a layer's parts stay together
    return _BACK_TO_FRONT.index(kind), unit.block != "mtp", -unit.layer, str(unit)
