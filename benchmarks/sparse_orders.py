"""Work that a conversion skips with experts ordered by popularity: with drawn loads, and on a routing trace.

A replay computes no weight gradients of experts that are still frozen. What is counted here is how much of
the experts' weight-gradient work that is, in proportion to tokens, over the replays of a window's conversion.
Experts only, all of one size; other units are frozen until the last snapshot in any order.

The trace is that of benchmarks/routing_trace.py. Its routing is played back: nothing is trained.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.routing_trace import spread
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.popularity import Popularity, has_moved, order_experts
from moe_ft.strategies.sparse.positions import RankUnits, StageUnits
from moe_ft.strategies.sparse.strategy import SparseStrategy
from moe_ft.strategies.sparse.windows import PositionSizes, cut_window
from moe_ft.units import Level, UnitId, UnitKind

WINDOWS = (3, 6)
SKEWNESS = (0.0, 0.25, 0.5, 0.75)
NUM_EXPERTS = 64
DECAY = 0.9
EP_SIZE = 16
RULES = (("25 % by 10 %", 0.10, 0.25), ("25 % by 50 %", 0.50, 0.25), ("every window", 0.0, 0.0))
_CHECKED_WINDOWS = 60

Row = Sequence[object]
Tokens = npt.NDArray[np.float64]  # [layer, expert], or with iterations before
Groups = npt.NDArray[np.int64]  # [layer, expert] the snapshot that has it at FULL


def equal_operators(count: int) -> PositionSizes:
    """Return operators of one parameter each, on one rank."""
    return PositionSizes(full=np.full((1, count), 12), compute=np.full((1, count), 2))


def skipped_share(loads: Sequence[float] | Tokens, ends: Sequence[int]) -> float:
    """Return how much of the experts' weight gradients a conversion leaves out, every replay alike.

    Args:
        loads: ``[position]`` work, in the order of the window.
        ends: ``[snapshot]`` as of `WindowCuts`.
    """
    remaining = np.append(np.cumsum(np.asarray(loads)[::-1])[::-1], 0.0)
    return float(remaining[list(ends[:-1])].sum() / remaining[0] / (len(ends) - 1))


def draw_loads(skewness: float, num_layers: int, generator: np.random.Generator) -> Tokens:
    """Return ``[layer, expert]`` loads of an expected skewness (Appendix D)."""
    if skewness == 0:
        return np.full((num_layers, NUM_EXPERTS), 1 / NUM_EXPERTS)
    alpha = (1 / skewness - 1) / NUM_EXPERTS
    return generator.dirichlet(np.full(NUM_EXPERTS, alpha), size=num_layers)


def share_of_order(loads: Tokens, scores: Tokens, stage: StageUnits, length: int) -> float:
    """Return what a conversion skips if the scores order the experts of a stage."""
    layers = [f"layer.{layer}" for layer in range(len(loads))]
    order = stage.order(scores)
    ordered = [
        [loads[layers.index(unit.layer_name), unit.expert] for unit in column if unit]
        for column in order.columns.values()
    ]
    by_position = np.array(ordered).sum(axis=0)
    return skipped_share(by_position, cut_window(order.sizes, length).ends)


def stage_of(num_layers: int, ep: int, num_owners: int) -> StageUnits:
    """Return a stage whose ranks each own a run of experts, as the distributed optimizer divides them."""
    num_local = NUM_EXPERTS // ep
    ranks = []
    for owner, ep_rank in itertools.product(range(num_owners), range(ep)):
        units = [
            UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)
            for layer in range(num_layers)
            for expert in range(ep_rank * num_local, (ep_rank + 1) * num_local)
        ]
        mine = np.array_split(np.arange(len(units)), num_owners)[owner]
        sizes = {unit: (12, 2) if index in mine else (0, 0) for index, unit in enumerate(units)}
        ranks.append(RankUnits(ep_rank=ep_rank, sizes=sizes))
    return StageUnits(ranks, [f"layer.{layer}" for layer in range(num_layers)])


def ordered_experts(scores: Tokens, ep: int) -> list[list[tuple[int, int]]]:
    """Return ``[expert-parallel rank]`` its experts, the least popular first."""
    num_layers, num_experts = scores.shape
    num_local = num_experts // ep
    return [
        order_experts(
            scores,
            [
                (layer, expert)
                for layer in range(num_layers)
                for expert in range(rank * num_local, (rank + 1) * num_local)
            ],
        )
        for rank in range(ep)
    ]


def skewness_rows(num_seeds: int) -> Iterator[Row]:
    """Yield what frozen experts skip with ascending, random and descending popularity, in %."""
    layouts = (
        ("1 rank, 1 layer", 1, 1, 1),
        ("8 ranks, 3 layers", 3, 8, 1),
        ("4 owners x 8 ranks, 3 layers", 3, 8, 4),
    )
    for (name, *layout), length, skewness in itertools.product(layouts, WINDOWS, SKEWNESS):
        num_layers, stage = layout[0], stage_of(*layout)
        shares: list[list[float]] = [[], [], []]
        for seed in range(num_seeds):
            generator = np.random.default_rng(seed)
            loads = draw_loads(skewness, num_layers, generator)
            for found, scores in zip(
                shares, (loads, generator.random(loads.shape), loads.max() - loads), strict=True
            ):
                found.append(100 * share_of_order(loads, scores, stage, length))
        gain = np.array(shares[0]) - np.array(shares[1])
        yield name, length, skewness, *(spread(np.array(each), 1) for each in (*shares, gain))


class PlayedWindows:
    """The windows of a run whose routing is known; sums up what their conversions would skip."""

    def __init__(self, tokens: Tokens, length: int, ep: int) -> None:
        self._tokens, self.length, self._ep = tokens, length, ep
        num_positions = tokens[0].size // ep
        self._groups = cut_window(equal_operators(num_positions), length).groups()
        self.starts = range(1, len(tokens) - length + 2, length)

    def place(self, scores: Tokens) -> Groups:
        """Return which snapshot has an expert at FULL in the order of scores."""
        groups = np.zeros(self._tokens[0].shape, dtype=np.int64)
        for order in ordered_experts(scores, self._ep):
            layers, experts = zip(*order, strict=True)
            groups[layers, experts] = self._groups
        return groups

    def replayed(self, start: int) -> Tokens:
        """Return the tokens of the iterations that a conversion of a window runs again."""
        return self._tokens[start : start + self.length - 1]

    def skipped(self, groups: Groups, start: int) -> float:
        """Return the share of the experts' work that a conversion of a window skips."""
        replayed = self.replayed(start)
        frozen = sum(each[groups > replay].sum() for replay, each in enumerate(replayed))
        return float(frozen / replayed.sum())

    def mean_of(self, groups: Groups | None = None) -> float:
        """Return the mean over all windows, in %; by default with the best order for each."""
        shares = [
            self.skipped(self.best(start) if groups is None else groups, start)
            for start in self.starts
        ]
        return 100 * float(np.mean(shares))

    def best(self, start: int) -> Groups:
        """Return the order of who knows what will be replayed."""
        return self.place(self.replayed(start).sum(axis=0))

    def play(self, measure: str, change: float, fraction: float) -> tuple[float, list[int]]:
        """Order experts as the strategy does; return what is skipped, in %, and when it reordered."""
        popularity, before = Popularity(measure, DECAY), None
        groups = self.place(np.zeros(self._tokens[0].shape))
        shares, reordered, counted = [], [], 0
        for start in self.starts:
            for tokens in self._tokens[counted:start]:
                popularity.add(tokens)
            counted, now = start, popularity.frequencies()
            if before is None or has_moved(before, now, change=change, fraction=fraction):
                groups, before = self.place(popularity.scores()), now
                popularity.restart()
                reordered.append(start)
            shares.append(self.skipped(groups, start))
        return 100 * float(np.mean(shares)), reordered


def check_against_strategy(tokens: Tokens) -> None:
    """Compare the first windows with those of the strategy itself."""
    played = PlayedWindows(tokens[: _CHECKED_WINDOWS * WINDOWS[0]], WINDOWS[0], EP_SIZE)
    _, reordered = played.play("count", 0.10, 0.25)
    num_layers, num_experts = tokens[0].shape
    ranks = [
        RankUnits(
            ep_rank=expert * EP_SIZE // num_experts,
            sizes={
                UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert + each): (12, 2)
                for layer in range(num_layers)
                for each in range(num_experts // EP_SIZE)
            },
        )
        for expert in range(0, num_experts, num_experts // EP_SIZE)
    ]
    layers = [f"layer.{layer}" for layer in range(num_layers)]
    options = SparseConfig(window=str(played.length), max_window=8)
    strategy = SparseStrategy(0, ranks, layers, options)
    found, popularity, counted = [], Popularity("count", DECAY), 0
    for start in played.starts:
        for each in tokens[counted:start]:
            strategy.add_tokens(each)
            popularity.add(each)
        counted, plan = start, strategy.plan_window(start)
        strategy.note_begun(plan)
        if plan.facts["reordered"]:
            found.append(start)
            groups = played.place(popularity.scores())
            popularity.restart()
        for number, snapshot in enumerate(plan.snapshots):
            full = (unit for unit, level in snapshot.levels.items() if level is Level.FULL)
            assert all(groups[unit.layer, unit.expert] == number for unit in full)
    assert found == reordered


def trace_rows(tokens: Tokens, name: str) -> Iterator[Row]:
    """Yield how often a rule reorders on a trace, and what conversions skip."""
    for length in WINDOWS:
        played = PlayedWindows(tokens, length, EP_SIZE)
        total = len(played.starts)
        at_start = played.place(np.zeros(tokens[0].shape))
        first = played.place(tokens[0])
        never, once = (played.mean_of(at_start), played.mean_of(first))
        best = played.mean_of()
        yield name, length, "none: order of the model", "", "0", f"{never:.1f}"
        yield name, length, "once, at the first window", "", "1", f"{once:.1f}"
        for measure, (rule, change, fraction) in itertools.product(("count", "decayed"), RULES):
            share, reordered = played.play(measure, change, fraction)
            often = f"{len(reordered)} of {total}"
            yield name, length, rule, measure, often, f"{share:.1f}"
        yield name, length, "knows what will be replayed", "", f"{total} of {total}", f"{best:.1f}"


def tokens_of(routed: npt.NDArray[np.int64]) -> Tokens:
    """Return ``[iteration, layer, expert]`` the tokens of each iteration."""
    return np.diff(routed, axis=0).astype(np.float64)


def redrawn(tokens: Tokens) -> Tokens:
    """Return tokens drawn anew in every iteration, with the same expectation."""
    return np.random.default_rng(0).poisson(tokens).astype(np.float64)
