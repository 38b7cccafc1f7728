"""Sparse windows: MoEvement's figures by calculation, what ordering by popularity saves, planning time.

    python -m benchmarks.sparse_schedule [TRACE.npz] [--seeds N] [--quick] [--output FILE.md]

Calculated: the figures of benchmarks/sparse_figures.py, the savings by the order of experts of
benchmarks/sparse_orders.py, and the sizes of snapshots with slices. Measured: only the time of planning.
"""

import argparse
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.output import markdown_table, parse_options, show
from benchmarks.paper_models import PRESETS, planned_preset
from benchmarks.routing_trace import load_routing, spread
from benchmarks.sparse_figures import paper_parts
from benchmarks.sparse_modules import module_rows
from benchmarks.sparse_orders import (
    EP_SIZE,
    NUM_EXPERTS,
    WINDOWS,
    check_against_strategy,
    redrawn,
    skewness_rows,
    tokens_of,
    trace_rows,
)
from moe_ft.planning.planned_job import PlannedStage
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.positions import RankUnits
from moe_ft.strategies.sparse.size import order_stage
from moe_ft.strategies.sparse.strategy import SparseStrategy
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    cut_window,
    shortest_window,
)
from moe_ft.units import UnitId, UnitKind

_NUM_ORDERS = 20

Row = Sequence[object]


def slice_rows() -> Iterator[Row]:
    """Yield how large the largest snapshot is, in % of a dense one, with slices as ranks own them."""
    model = PRESETS["gpt-350m-16e"]
    flags = ("--use-distributed-optimizer", "--moe-ft-strategy", "sparse")
    for shape, dp, ep in (
        (model, 8, 8),
        (model, 16, 8),
        (model, 32, 8),
        (model, 64, 8),
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

        with mock.patch("moe_ft.strategies.sparse.positions.spread_over_ranks", _keep_order):
            by_popularity_alone = draw()
        spread_over_owners = draw()
        owned = spread_over_owners[0]
        # A rank whose slice has a part of everything, which all have if ranks own parts of every unit.
        mean = replace(owned, full=_mean_rank(owned.full), compute=_mean_rank(owned.compute))
        name = f"{shape.num_experts} experts" if shape.num_moe_layers else "no experts"
        for length in (2, *WINDOWS):
            drawn = [
                spread(np.array([_largest(each, length) for each in orders]), 1)
                for orders in (by_popularity_alone, spread_over_owners)
            ]
            yield name, f"{dp}, {ep}", length, f"{_largest(mean, length):.1f}", *drawn


def _keep_order(full: npt.NDArray[np.int64]) -> list[int]:
    return list(range(full.shape[1]))


def _mean_rank(num_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return num_bytes.mean(axis=0, keepdims=True).astype(np.int64)


def _largest(sizes: PositionSizes, length: int) -> float:
    """Return the largest snapshot of any rank in % of the largest dense one."""
    dense = float(sizes.full.sum(axis=1).max())
    return 100 * cut_window(sizes, length).largest_bytes / dense


def time_of(function: Callable[[], object], repetitions: int) -> str:
    """Return the processor time of a call, in ms: nothing in it waits."""
    times = []
    for _ in range(repetitions):
        begin = time.process_time()
        function()
        times.append((time.process_time() - begin) * 1e3)
    return f"{median(times):.2f} ({min(times):.2f}-{max(times):.2f})"


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
        layers = [f"layer.{layer}" for layer in range(num_layers)]
        ranks = [stage_rank(rank % ep, num_layers, num_local) for rank in range(num_ranks)]
        if is_grouped:
            ranks = [replace(each, grouped_layers=frozenset(layers)) for each in ranks]
        strategy = SparseStrategy(0, ranks, layers, SparseConfig(window="6", max_window=8))
        generator = np.random.default_rng(0)
        shape = (num_layers, ep * num_local)
        another = partial(plan_another_order, strategy, generator, shape)
        name = f"{num_ranks} ranks, {len(ranks[0].sizes)} units each" + ", grouped" * is_grouped
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
    """Plan a window for which the experts are ordered anew."""
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
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; median (range) of {options.seeds} "
        f"seeds and of {options.repetitions} repetitions. Python {platform.python_version()}, numpy "
        f"{np.__version__}.",
        *paper_parts(),
        f"Calculated, with drawn loads of {NUM_EXPERTS} experts: weight gradients of experts that a "
        "conversion skips, in %",
        markdown_table(
            skewness_rows(options.seeds),
            ("layout", "W", "S", "ascending", "random", "descending", "ascending - random"),
        ),
    ]
    slice_headers = ("GPT-350M", "dp, ep", "W", "parts of every unit", "popularity alone")
    parts += [
        "Calculated: the largest snapshot of any rank, % of a dense one, with slices as Megatron's "
        f"distributed optimizer cuts them from one buffer; orders of popularity: {_NUM_ORDERS} drawn",
        markdown_table(slice_rows(), (*slice_headers, "spread over owners")),
    ]
    if options.trace:
        tokens = tokens_of(load_routing(options.trace))
        check_against_strategy(tokens)
        variants = (("interpolated", tokens), ("drawn", redrawn(tokens)))
        rows = itertools.chain.from_iterable(trace_rows(each, name) for name, each in variants)
        headers = ("tokens", "W", "reorders", "measure", "times", "skipped, %")
        parts += [f"Played back: the routing trace, ep {EP_SIZE}", markdown_table(rows, headers)]
        module_headers = (
            "stage: experts of a module",
            "owners",
            "W",
            "one by one",
            "grouped, old order",
        )
        prices = ("modules", "largest, +%", "window, +%", "whole modules only", "largest, +%")
        parts += [
            "Played back: grouped GEMM, weight gradients of experts that a conversion skips, in %",
            markdown_table(module_rows(tokens), (*module_headers, *prices)),
        ]
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
