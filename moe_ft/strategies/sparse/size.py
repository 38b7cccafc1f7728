"""Bytes of sparse windows of a model that need not exist: snapshots, windows, host memory.

There is no tensor parallelism. Headers, records and the gaps that align tensors are left out. strategy.py
orders and cuts units while training runs; planning/model_size.py has the sizes of models, cost.py the stalls
and recoveries.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.model_size import ByteModel
from moe_ft.planning.ownership import SavingLayout, owned_slices
from moe_ft.strategies.sparse.popularity import Scores
from moe_ft.strategies.sparse.positions import (
    from_back_to_front,
    order_units,
    spread_over_ranks,
)
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    WindowCuts,
    count_splits,
    cut_window,
    reserved_window_bytes,
    shortest_window,
    snapshot_bytes,
)
from moe_ft.units import UnitId, UnitKind

Units = Mapping[UnitId, int]  # parameters of each
Numbers = npt.NDArray[np.int64]


def position_sizes(
    units: Units,
    layout: SavingLayout,
    byte_model: ByteModel,
    popularity: np.random.Generator | None = None,
    *,
    is_grouped: bool = False,
) -> PositionSizes:
    """Return what every rank of a stage saves at each position of its order.

    Experts come first, then everything else back to front, both spread over the ranks that own them
    (positions.py). A rank saves the slices that it owns (planning/ownership.py). The distributed optimizer
    has one buffer of experts and one of everything else; with --overlap-grad-reduce the first stage has
    smaller buffers, and more even slices.

    Args:
        layout: of its ranks; experts are divided among them in equal numbers.
        byte_model: master weights and moments are what FULL is, weights what COMPUTE is.
        popularity: draws how popular experts are; from seed 0 the order that training begins with. None:
            the order of the model.
        is_grouped: whether a rank's experts of a layer are one module, frozen only as a whole.

    Raises:
        PlanError: if COMPUTE is larger than FULL.
    """
    columns = _columns(units, layout, popularity, is_grouped=is_grouped)
    experts = np.zeros((layout.dp, len(columns[0].units)), np.int64)
    for ep_rank, column in enumerate(columns):
        experts[ep_rank :: layout.ep] = column.owned
    elements = np.concatenate([experts, _others_of(units, layout)[1]], axis=1)
    modules = [[unit.layer_name for unit in column.units] for column in columns]
    return PositionSizes(
        full=elements * byte_model.optimizer,
        compute=elements * byte_model.weights,
        splits=count_splits(modules, elements.shape[1]) if is_grouped else None,
    )


def position_work(
    units: Units,
    layout: SavingLayout,
    active_share: float,
    popularity: np.random.Generator | None = None,
    *,
    is_grouped: bool = False,
) -> npt.NDArray[np.float64]:
    """Return ``[position]`` the parameters that a token passes through and that freeze there, on average.

    Experts that are one module are frozen for as long as the first of them is.

    Args:
        active_share: of the experts of a layer, those that a token goes to.
    """
    columns = _columns(units, layout, popularity, is_grouped=is_grouped)
    experts = np.zeros(len(columns[0].units))
    for column in columns:
        firsts: dict[str, int] = {}
        for place, unit in enumerate(column.units):
            at = firsts.setdefault(unit.layer_name, place) if is_grouped else place
            experts[at] += units[unit]
    others, _ = _others_of(units, layout)
    # An embedding is looked up: there is no matrix product whose gradient could be left out.
    others_work = [0 if unit.kind is UnitKind.EMBEDDING else units[unit] for unit in others]
    return np.concatenate([experts * active_share, others_work])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Column:
    """The experts of an expert-parallel rank, in the order in which they are saved.

    Attributes:
        owned: ``[rank, position]`` the parameters that each of the ranks that have them saves.
    """

    units: list[UnitId]
    owned: Numbers


def _columns(
    units: Units,
    layout: SavingLayout,
    popularity: np.random.Generator | None,
    *,
    is_grouped: bool,
) -> list[_Column]:
    """Return ``[expert-parallel rank]`` its experts as the strategy orders them."""
    by_ep_rank = _experts_of(units, layout.ep)
    scores = _draw_scores(by_ep_rank, popularity)
    columns = []
    for own in by_ep_rank:
        owned = owned_slices([[units[unit]] for unit in own], layout.num_groups, layout)
        modules = [unit.layer_name for unit in own] if is_grouped else None
        order = order_units(scores, _places(own), modules, owned)
        columns.append(_Column(units=[own[place] for place in order], owned=owned[:, order]))
    return columns


def _experts_of(units: Units, ep: int) -> list[list[UnitId]]:
    """Return ``[expert-parallel rank]`` its experts, in the order of the model."""
    experts = sorted(unit for unit in units if unit.kind is UnitKind.EXPERT)
    if not experts:
        return [[] for _ in range(ep)]
    num_layers, num_experts = len({unit.layer_name for unit in experts}), experts[-1].expert + 1
    layout = ExpertLayout(num_layers=num_layers, num_experts=num_experts, ep_size=ep)
    return [[unit for unit in experts if layout.rank_of(unit.expert) == rank] for rank in range(ep)]


def _others_of(units: Units, layout: SavingLayout) -> tuple[list[UnitId], Numbers]:
    """Return the units that are no experts, in order, and ``[rank, unit]`` the parameters that it saves."""
    names = [unit for unit in units if unit.kind is not UnitKind.EXPERT]
    owned = owned_slices([[units[unit]] for unit in names], layout.dp, layout)
    back_to_front = sorted(range(len(names)), key=lambda index: from_back_to_front(names[index]))
    spread = spread_over_ranks(owned[:, back_to_front])
    order = [back_to_front[place] for place in spread]
    return [names[index] for index in order], owned[:, order]


def _draw_scores(
    by_ep_rank: Sequence[Sequence[UnitId]], popularity: np.random.Generator | None
) -> Scores:
    """Return ``[layer, expert]`` how popular experts are, all equal if that is not drawn."""
    num_layers = len({unit.layer_name for unit in by_ep_rank[0]})
    shape = (num_layers, 1 + max((unit.expert for unit in by_ep_rank[-1]), default=-1))
    return np.zeros(shape) if popularity is None else popularity.random(shape)


def _places(experts: Sequence[UnitId]) -> list[tuple[int, int]]:
    """Return for each expert the index of its layer among the MoE layers, and its number."""
    layers = sorted({(unit.block, unit.layer) for unit in experts})
    index = {layer: number for number, layer in enumerate(layers)}
    return [(index[unit.block, unit.layer], unit.expert) for unit in experts]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSize:
    """Sizes of windows of one length, on the ranks that need the most.

    Attributes:
        cuts: ``[stage]``.
        snapshots: ``[snapshot]`` the most bytes that a rank of any stage saves.
        window_bytes: the most that a rank saves in a whole window.
        dense_bytes: the most that a rank saves in a snapshot of everything at FULL.
    """

    cuts: tuple[WindowCuts, ...]
    snapshots: tuple[int, ...]
    window_bytes: int
    dense_bytes: int

    @property
    def length(self) -> int:
        """Snapshots of the window."""
        return len(self.snapshots)

    @property
    def largest_bytes(self) -> int:
        """The largest snapshot of any rank."""
        return max(self.snapshots)

    @property
    def mean_bytes(self) -> float:
        """The mean over the snapshots of the largest of each."""
        return sum(self.snapshots) / self.length


def measure_window(stages: Sequence[PositionSizes], length: int) -> WindowSize:
    """Return what windows of a length take if the largest snapshot of each stage is the least possible."""
    cuts = tuple(cut_window(stage, length) for stage in stages)
    by_stage = [snapshot_bytes(stage, each.ends) for stage, each in zip(stages, cuts, strict=True)]
    return WindowSize(
        cuts=cuts,
        snapshots=tuple(np.max([of_stage.max(axis=0) for of_stage in by_stage], axis=0).tolist()),
        window_bytes=int(max(of_stage.sum(axis=1).max() for of_stage in by_stage)),
        dense_bytes=int(max(stage.full.sum(axis=1).max() for stage in stages)),
    )


def choose_length(stages: Sequence[PositionSizes], budget_bytes: float, longest: int) -> int:
    """Return the longest of the shortest windows that fit the stages.

    Args:
        stages: of the job, which agree on one length.
        budget_bytes: what any rank can copy in one snapshot.
        longest: snapshots that the window may have, which it has if none fits.

    Source: MoEvement, Algorithm 1, FindWindowSize, by bytes; see windows.py.
    """
    shortest = [shortest_window(stage, budget_bytes, longest) for stage in stages]
    return max(
        cuts.length if cuts.largest_bytes <= budget_bytes else _longest(stage, longest)
        for stage, cuts in zip(stages, shortest, strict=True)
    )


def region_bytes(
    stages: Sequence[PositionSizes], longest: int, margin: float, *, shortest: int = 1
) -> int:
    """Return what a region of the rank that needs the most has room for.

    It is made for the longest window, as the strategy's (see `reserved_window_bytes`).

    Args:
        stages: of the job, in the order that training begins with.
        margin: fraction that is also reserved, for other orders.
    """
    lengths = [_longest(stage, longest) for stage in stages]
    most = max(
        float(reserved_window_bytes(stage, min(shortest, length), length).max())
        for stage, length in zip(stages, lengths, strict=True)
    )
    return math.ceil(most * (1 + margin))


def _longest(stage: PositionSizes, longest: int) -> int:
    return max(1, min(longest, stage.num_positions))
