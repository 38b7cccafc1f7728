"""Sparse windows of a job that need not exist: bytes of snapshots and windows, iterations that run again.

Headers and records are left out. strategy.py orders and cuts units while training runs. The units of a job
are in planning/planned_job.py; planning/job_costs.py makes costs of the sizes.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ft.planning.experts import experts_of_stage
from moe_ft.planning.planned_job import PlannedStage
from moe_ft.strategies.sparse.positions import StageOrder, StageUnits, rank_units
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    WindowCuts,
    cut_window,
    reserved_window_bytes,
    shortest_window,
    snapshot_bytes,
)
from moe_ft.units import UnitId, UnitKind

WEIGHT_GRADIENT_SHARE = 1 / 3  # of a layer's matrix products: forward, input and weight gradients


@functools.lru_cache(maxsize=32)  # advice asks for the same orders again and again
def order_stage(
    stage: PlannedStage, num_experts: int, seed: int, *, is_grouped: bool
) -> StageOrder:
    """Return the units of a stage as the strategy orders them.

    Args:
        seed: draws how popular experts are; 0 draws the order that training begins with.
        is_grouped: whether a rank's experts of a layer are one module, frozen only as a whole.
    """
    layers, _ = experts_of_stage([rank.units for rank in stage.ranks], num_experts)
    grouped = frozenset(layers if is_grouped else ())
    ranks = [rank_units(rank.ep_rank, rank, grouped) for rank in stage.ranks]
    scores = np.random.default_rng(seed).random((len(layers), max(1, num_experts)))
    return StageUnits(ranks, layers).order(scores)


def position_work(
    order: StageOrder, elements: Mapping[UnitId, int], active_share: float, *, is_grouped: bool
) -> npt.NDArray[np.float64]:
    """Return ``[position]`` the parameters that a token passes through and that freeze there, on average.

    Experts that are one module are frozen for as long as the first of them is.

    Args:
        elements: parameters of each unit.
        active_share: of the experts of a layer, those that a token goes to.
    """
    work = np.zeros(order.sizes.num_positions)
    for number, column in enumerate(order.columns.values()):
        firsts: dict[str, int] = {}
        for place, unit in enumerate(column):
            if unit is None:
                continue
            if unit.kind is UnitKind.EXPERT:
                at = firsts.setdefault(unit.layer_name, place) if is_grouped else place
                work[at] += elements[unit] * active_share
            # An embedding is looked up: there is no matrix product whose gradient could be left out.
            elif number == 0 and unit.kind is not UnitKind.EMBEDDING:
                work[place] += elements[unit]
    return work


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


def work_to_redo(window: int, lag: int) -> tuple[int, float, int]:
    """Return the least, mean and most iterations that a failure makes run again, conversion included.

    The newest window that peers have began ``window + lag`` to twice as many iterations ago; half an
    iteration that was under way is part of the mean. MoEvement (section 3.6) prints 0 to 2 W and a mean
    of 1.5 W; its least is reached only if recovery were free. The lag delays the next window too.

    Args:
        lag: iterations until peers have its last snapshot.
    """
    period = window + lag
    return period, 1.5 * period, 2 * period


def frozen_s(
    window: WindowSize, iteration_s: float, works: Sequence[npt.NDArray[np.float64]]
) -> float:
    """Return the time that frozen units save in the conversion of a window at best.

    A window of W snapshots is converted by W - 1 replays (recovery/restore.py; MoEvement, section 3.3,
    has one more). At best a frozen unit costs no weight gradient, and the slowest stage, which all wait for,
    does nothing else but matrix products.

    Args:
        works: ``[stage][position]`` as of `position_work`.
    """
    frozen = sum(
        min(
            _frozen_share(work, cuts.ends[replay])
            for work, cuts in zip(works, window.cuts, strict=True)
        )
        for replay in range(window.length - 1)
    )
    return frozen * WEIGHT_GRADIENT_SHARE * iteration_s


def _frozen_share(work: npt.NDArray[np.float64], end: int) -> float:
    total = float(work.sum())
    return float(work[end:].sum()) / total if total else 0.0
