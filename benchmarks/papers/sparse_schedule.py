"""Sparse windows: what ordering by popularity saves, sizes with slices, planning time.

    python -m benchmarks.papers.sparse_schedule [TRACE.npz] [--seeds N] [--quick] [--output FILE.md]

A replay computes no weight gradients of experts that are still frozen. What is counted here is how much of
the experts' weight-gradient work that is, in proportion to tokens, over the replays of a window's conversion.
Experts only, all of one size; other units are frozen until the last snapshot in any order. The trace is that
of routing.py. Its routing is played back through the strategy: nothing is trained. Sizes of snapshots
with slices are calculated. Measured is only the time of planning.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.output import conditions, markdown_table, parse_options, show, spread
from benchmarks.papers.models import PRESETS, planned_preset
from benchmarks.papers.routing import load_routing
from moe_ft.planning.planned_job import PlannedStage
from moe_ft.strategies.sparse.plan import order_stage
from moe_ft.strategies.sparse.strategy import SparseConfig, SparseStrategy
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    RankUnits,
    StageOrder,
    StageUnits,
    WindowCuts,
    cut_window,
    shortest_window,
)
from moe_ft.units import UnitId, UnitKind

WINDOWS = (3, 6)
SKEWNESS = (0.0, 0.25, 0.5, 0.75)
NUM_EXPERTS = 64
EP_SIZE = 16
RULES = (("25 % by 10 %", 0.10, 0.25), ("25 % by 50 %", 0.50, 0.25), ("every window", 0.0, 0.0))
_NUM_ORDERS = 20

Row = Sequence[object]
Tokens = npt.NDArray[np.float64]  # [layer, expert], or with iterations before
Groups = npt.NDArray[np.int64]  # [layer, expert] the snapshot that has it at FULL


# --- orders


def ranks_of(num_layers: int, num_experts: int, ep: int, num_owners: int = 1) -> list[RankUnits]:
    """Return ranks that each own a run of experts, as the distributed optimizer divides them."""
    num_local = num_experts // ep
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
    return ranks


def names_of(num_layers: int) -> list[str]:
    """Return the names of layers."""
    return [f"layer.{layer}" for layer in range(num_layers)]


def groups_of(order: StageOrder, cuts: WindowCuts, shape: tuple[int, ...]) -> Groups:
    """Return which snapshot of a window has each expert at FULL."""
    found = np.zeros(shape, np.int64)
    for column in order.columns.values():
        for unit, group in zip(column, cuts.groups(), strict=True):
            assert unit is not None, "all ranks have as many experts"
            found[unit.layer, unit.expert] = group
    return found


def by_scores(stage: StageUnits, scores: Tokens, length: int) -> Groups:
    """Return the groups of a window whose units scores order."""
    order = stage.order(scores)
    return groups_of(order, cut_window(order.sizes, length), scores.shape)


def skipped(groups: Groups, replayed: Sequence[Tokens] | Tokens) -> float:
    """Return the share of the experts' weight-gradient work that a conversion skips, in %.

    Args:
        replayed: ``[replay, layer, expert]`` tokens.
    """
    frozen = sum(float(each[groups > replay].sum()) for replay, each in enumerate(replayed))
    return 100 * frozen / float(np.sum(replayed))


def draw_loads(skewness: float, num_layers: int, generator: np.random.Generator) -> Tokens:
    """Return ``[layer, expert]`` loads of an expected skewness (Appendix D)."""
    if skewness == 0:
        return np.full((num_layers, NUM_EXPERTS), 1 / NUM_EXPERTS)
    alpha = (1 / skewness - 1) / NUM_EXPERTS
    return generator.dirichlet(np.full(NUM_EXPERTS, alpha), size=num_layers)


def skewness_rows(num_seeds: int) -> Iterator[Row]:
    """Yield what frozen experts skip with ascending, random and descending popularity, in %."""
    layouts = (
        ("1 rank, 1 layer", 1, 1, 1),
        ("8 ranks, 3 layers", 3, 8, 1),
        ("4 owners x 8 ranks, 3 layers", 3, 8, 4),
    )
    for (name, num_layers, ep, owners), length, skewness in itertools.product(
        layouts, WINDOWS, SKEWNESS
    ):
        stage = StageUnits(ranks_of(num_layers, NUM_EXPERTS, ep, owners), names_of(num_layers))
        shares: list[list[float]] = [[], [], []]
        for seed in range(num_seeds):
            generator = np.random.default_rng(seed)
            loads = draw_loads(skewness, num_layers, generator)
            orders = (loads, generator.random(loads.shape), loads.max() - loads)
            for found, scores in zip(shares, orders, strict=True):
                found.append(skipped(by_scores(stage, scores, length), [loads] * (length - 1)))
        gain = [first - second for first, second in zip(*shares[:2], strict=True)]
        yield name, length, skewness, *(spread(each, ".1f") for each in (*shares, gain))


def trace_rows(tokens: Tokens, name: str) -> Iterator[Row]:
    """Yield how often the strategy reorders on a trace with each rule, and what conversions skip."""
    shape = num_layers, num_experts = tokens[0].shape
    ranks, layers = ranks_of(num_layers, num_experts, EP_SIZE), names_of(num_layers)
    stage = StageUnits(ranks, layers)
    for length in WINDOWS:
        starts = range(1, len(tokens) - length + 2, length)
        replayed = [tokens[start : start + length - 1] for start in starts]

        def mean_of(groups: Sequence[Groups], replayed: Sequence[Tokens] = replayed) -> str:
            return f"{np.mean([*map(skipped, groups, replayed)]):.1f}"

        never, once = (by_scores(stage, each, length) for each in (np.zeros(shape), tokens[0]))
        best = [by_scores(stage, each.sum(axis=0), length) for each in replayed]
        total = len(starts)
        yield name, length, "none: order of the model", "", "0", mean_of([never] * total)
        yield name, length, "once, at the first window", "", "1", mean_of([once] * total)
        for measure, (rule, change, fraction) in itertools.product(("count", "decayed"), RULES):
            options = SparseConfig(
                window=str(length),
                unit_order=measure,
                reorder_change=change,
                reorder_fraction=fraction,
            )
            strategy = SparseStrategy(0, ranks, layers, options)
            found, num_reordered, counted = list[Groups](), 0, 0
            for start in starts:
                for each in tokens[counted:start]:
                    strategy.add_tokens(each)
                counted, plan = start, strategy.plan_window(start)
                strategy.note_begun(plan)
                num_reordered += plan.memo.restarts_counts
                ordering = plan.memo.ordering
                found.append(groups_of(ordering.order, ordering.cut(length), shape))
            yield name, length, rule, measure, f"{num_reordered} of {total}", mean_of(found)
        yield name, length, "knows what will be replayed", "", f"{total} of {total}", mean_of(best)


# --- slices


def slice_rows() -> Iterator[Row]:
    """Yield how large the largest snapshot is, in % of a dense one, with slices as ranks own them."""
    model = PRESETS["gpt-350m-16e"]
    flags = ("--use-distributed-optimizer", "--moe-ft-strategy", "sparse")
    for shape, dp, ep in (
        *((model, dp, 8) for dp in (8, 16, 32, 64)),
        (replace(model, moe_layers=()), 8, 1),
    ):
        (stage,) = planned_preset(shape, *flags, dp=dp, ep=ep).stages
        num_experts = shape.num_experts if shape.moe_layers else 0

        def draw(
            stage: PlannedStage = stage, num_experts: int = num_experts
        ) -> list[PositionSizes]:
            return [
                order_stage(stage, num_experts, seed, is_grouped=False).sizes
                for seed in range(_NUM_ORDERS)
            ]

        with mock.patch(
            "moe_ft.strategies.sparse.windows.spread_over_ranks",
            lambda full: list(range(full.shape[1])),
        ):
            by_popularity_alone = draw()
        spread_over_owners = draw()
        owned = spread_over_owners[0]
        # A rank whose slice has a part of everything, which all have if ranks own parts of every unit.
        mean = replace(owned, full=_mean_rank(owned.full), compute=_mean_rank(owned.compute))
        name = f"{shape.num_experts} experts" if shape.num_moe_layers else "no experts"
        for length in (2, *WINDOWS):
            drawn = [
                spread([_largest(each, length) for each in orders], ".1f")
                for orders in (by_popularity_alone, spread_over_owners)
            ]
            yield name, f"{dp}, {ep}", length, f"{_largest(mean, length):.1f}", *drawn


def _mean_rank(num_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return num_bytes.mean(axis=0, keepdims=True).astype(np.int64)


def _largest(sizes: PositionSizes, length: int) -> float:
    """Return the largest snapshot of any rank in % of the largest dense one."""
    dense = float(sizes.full.sum(axis=1).max())
    return 100 * cut_window(sizes, length).largest_bytes / dense


# --- planning


def time_of(function: Callable[[], object], repetitions: int) -> str:
    """Return the processor time of a call, in ms: nothing in it waits."""
    times = []
    for _ in range(repetitions):
        begin = time.process_time()
        function()
        times.append((time.process_time() - begin) * 1e3)
    return spread(times, ".2f")


def cut_rows(repetitions: int) -> Iterator[Row]:
    """Yield how long windows are cut, in ms."""
    generator = np.random.default_rng(0)
    for num_ranks, num_positions, differ in (
        (64, 2000, True),
        (64, 2000, False),
        (1024, 500, True),
        (8, 200, True),
    ):
        full = generator.integers(1, 10**9, (num_ranks if differ else 1, num_positions))
        full = np.broadcast_to(full, (num_ranks, num_positions)).copy()
        sizes = PositionSizes(full=full, compute=full // 6)
        name = f"{num_ranks} {'different' if differ else 'equal'} ranks, {num_positions} positions"
        budget = 0.3 * float(full.sum(axis=1).max())
        cut, fit = partial(cut_window, sizes, 6), partial(shortest_window, sizes, budget, 8)
        yield name, "cut_window, 6", time_of(cut, repetitions)
        yield name, "shortest_window, up to 8", time_of(fit, repetitions)


def plan_rows(repetitions: int) -> Iterator[Row]:
    """Yield how long the training thread of a rank plans a window, in ms."""
    stages = ((8, 8, 4, 8), (16, 8, 7, 32), (64, 8, 28, 8))
    for (num_ranks, ep, num_layers, num_local), is_grouped in itertools.product(
        stages, (False, True)
    ):
        layers = names_of(num_layers)
        ranks = [stage_rank(rank % ep, num_layers, num_local) for rank in range(num_ranks)]
        if is_grouped:
            ranks = [replace(each, grouped_layers=frozenset(layers)) for each in ranks]
        strategy = SparseStrategy(0, ranks, layers, SparseConfig(window="6", max_window=8))
        generator = np.random.default_rng(0)
        shape = (num_layers, ep * num_local)
        another = partial(plan_another_order, strategy, generator, shape)
        name = f"{num_ranks} ranks, {len(ranks[0].sizes)} units each"
        name += ", grouped" if is_grouped else ""
        yield name, "plan_window, 6, another order", time_of(another, repetitions)
        counts = generator.integers(0, 1000, shape)
        for _ in range(2):  # the first plan orders by them, later ones find them again
            strategy.add_tokens(counts)
            strategy.note_begun(strategy.plan_window(0))
        same = partial(strategy.plan_window, 0)
        yield name, "plan_window, 6, same order", time_of(same, repetitions)


def stage_rank(ep_rank: int, num_layers: int, num_local: int) -> RankUnits:
    """Return the units of a rank: experts, and layers without them."""
    sizes = {}
    for layer in range(num_layers):
        for expert in range(ep_rank * num_local, (ep_rank + 1) * num_local):
            sizes[UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)] = (12_000, 2_000)
        sizes[UnitId(kind=UnitKind.NON_EXPERT, layer=layer)] = (2_400, 400)
    return RankUnits(ep_rank=ep_rank, sizes=sizes)


def plan_another_order(
    strategy: SparseStrategy, generator: np.random.Generator, shape: tuple[int, int]
) -> None:
    """Plan a window for which the experts are ordered again."""
    strategy.add_tokens(generator.integers(0, 1000, shape))
    plan = strategy.plan_window(0)
    assert plan.facts["reordered"]
    strategy.note_begun(plan)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE.npz")
    parser.add_argument("--seeds", type=int, default=100, help="of the drawn loads")
    parser.add_argument("--repetitions", type=int, default=21, help="of what is timed")
    options = parse_options(parser, seeds=1, repetitions=1)
    parts = [
        conditions(
            f"Median (range) of {options.seeds} seeds and of {options.repetitions} repetitions. "
            f"numpy {np.__version__}."
        ),
        f"Calculated, with drawn loads of {NUM_EXPERTS} experts: weight gradients of experts that a "
        "conversion skips, in %",
        markdown_table(
            skewness_rows(options.seeds),
            ("layout", "W", "S", "ascending", "random", "descending", "ascending - random"),
        ),
        "Calculated: the largest snapshot of any rank, % of a dense one, with slices as Megatron's "
        f"distributed optimizer cuts them from one buffer; orders of popularity: {_NUM_ORDERS} drawn",
        markdown_table(
            slice_rows(),
            (
                *("GPT-350M", "dp, ep", "W", "parts of every unit", "popularity alone"),
                "spread over owners",
            ),
        ),
    ]
    if options.trace:
        tokens = np.diff(load_routing(options.trace), axis=0).astype(np.float64)
        # Drawn again in every iteration, with the same expectation.
        drawn = np.random.default_rng(0).poisson(tokens).astype(np.float64)
        variants = (("interpolated", tokens), ("drawn", drawn))
        rows = itertools.chain.from_iterable(trace_rows(each, name) for name, each in variants)
        headers = ("tokens", "W", "reorders", "measure", "times", "skipped, %")
        parts += [f"Played back: the routing trace, ep {EP_SIZE}", markdown_table(rows, headers)]
    parts += [
        "Measured: planning, ms of processor time",
        markdown_table(
            itertools.chain(cut_rows(options.repetitions), plan_rows(options.repetitions)),
            ("stage", "function", "ms"),
        ),
    ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
