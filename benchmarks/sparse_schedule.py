"""Sparse windows: MoEvement's figures by calculation, what ordering by popularity saves, planning time.

    python -m benchmarks.sparse_schedule [TRACE.npz] [--seeds N] [--output FILE.md]

Calculated: Fig. 6, W_sparse of Tables 3 and 7, host memory of Table 6; what experts' order saves is
benchmarks/sparse_orders.py. Measured: only the time that planning takes.

Verdicts: REPRODUCED if equal when rounded or cut off as printed, CLOSE within 5 % of the printed figure
(windows: never), else NOT.
"""

import argparse
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from benchmarks.output import show
from benchmarks.paper_models import PRESETS
from benchmarks.paper_windows import OperatorProfile, find_window_size, generate_schedule
from benchmarks.routing_trace import load_routing, spread
from benchmarks.sparse_modules import module_rows
from benchmarks.sparse_orders import (
    EP_SIZE,
    NUM_EXPERTS,
    WINDOWS,
    check_against_strategy,
    equal_operators,
    redrawn,
    skewness_rows,
    tokens_of,
    trace_rows,
)
from moe_ft.planning.model_size import ByteModel, stage_units
from moe_ft.planning.ownership import SavingLayout
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.positions import RankUnits
from moe_ft.strategies.sparse.size import Units, position_sizes
from moe_ft.strategies.sparse.strategy import SparseStrategy
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    cut_window,
    shortest_window,
    snapshot_bytes,
)
from moe_ft.units import UnitId, UnitKind

CLOSE = 0.05
BANDWIDTHS = (
    20.8,
    21.8,
    15.1,
)  # GB/s; the first two are fitted, the last follows from Table 7 (MoC)
LONGEST = 64
_NUM_ORDERS = 20

Row = Sequence[object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A row of Table 3 or 7.

    Attributes:
        total, active: parameters, 1e9 (Table 2).
        active_experts: that a token goes to, without shared ones.
        sizes: bytes per parameter of compute weights, master weights, optimizer state.
        iteration_s: not printed; follows from what the tables say of MoC-System.
        window: W_sparse as printed.
    """

    name: str
    total: float
    active: float
    num_layers: int
    num_experts: int
    active_experts: int
    iteration_s: float
    window: int
    sizes: tuple[int, int, int] = (2, 4, 8)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return round(self.total * 1e9)

    @property
    def expert_parameters(self) -> int:
        """Parameters of an expert, of which a token leaves out all but the active ones."""
        left_out = self.num_layers * (self.num_experts - self.active_experts)
        return round((self.total - self.active) * 1e9 / left_out)


DEEPSEEK = Case(
    name="DeepSeek-MoE",
    total=16.4,
    active=3.7,
    num_layers=28,
    num_experts=64,
    active_experts=8,
    iteration_s=2.9,
    window=6,
)
TABLE_3 = (
    Case(
        name="MoE-LLaVa",
        total=2.9,
        active=2.0,
        num_layers=32,
        num_experts=4,
        active_experts=2,
        iteration_s=1.7,
        window=3,
    ),
    Case(
        name="GPT-MoE",
        total=7.3,
        active=1.6,
        num_layers=12,
        num_experts=32,
        active_experts=6,
        iteration_s=2.1,
        window=3,
    ),
    Case(
        name="QWen-MoE",
        total=14.3,
        active=2.7,
        num_layers=24,
        num_experts=64,
        active_experts=8,
        iteration_s=2.5,
        window=5,
    ),
    DEEPSEEK,
)
TABLE_7 = tuple(
    replace(DEEPSEEK, name=name, sizes=sizes, iteration_s=iteration_s, window=window)
    for name, sizes, iteration_s, window in (
        ("FP16, FP16, FP16+FP16", (2, 2, 4), 3.0, 3),
        ("FP8, FP32, FP32+FP32", (1, 4, 8), 2.3, 6),
        ("FP8, FP16, FP32+FP32", (1, 2, 8), 2.1, 4),
        ("FP8, FP16, FP8+FP16", (1, 2, 3), 1.9, 3),
        ("FP8, FP8, FP8+FP16", (1, 1, 3), 1.7, 3),
    )
)
HOST_MEMORY = ((75.4, 81.2), (189.8, 205.2), (371.6, 420.8), (426.4, 478.7))  # GB: Gemini, X


def verdict(ours: float, paper: float, digits: int = 0) -> str:
    """Compare a figure with one that is printed with so many digits."""
    scale = 10**digits
    if paper in (round(ours, digits), math.floor(ours * scale) / scale):
        return "REPRODUCED"
    word = "CLOSE" if abs(ours - paper) <= CLOSE * abs(paper) else "NOT"
    return f"{word} ({ours - paper:+.{digits + 1}f})"


def figure_6_rows() -> Iterator[Row]:
    """Yield how much smaller than a dense one each snapshot of Fig. 6 is, in %."""
    sizes = equal_operators(6)
    ours = snapshot_bytes(sizes, cut_window(sizes, 3).ends)[0].tolist()
    printed = {0: 55}
    for number, snapshot in enumerate(generate_schedule(range(6), 3, 2)):
        paper = 12 * len(snapshot.active) + 2 * len(snapshot.frozen)
        saved = [100 * (1 - size / 72) for size in (paper, ours[number])]
        says = verdict(saved[1], printed[number]) if number in printed else ""
        yield number + 1, f"{saved[0]:.1f}", f"{saved[1]:.1f}", printed.get(number, ""), says
    mean = [100 * (1 - 28 / 72), 100 * (1 - sum(ours) / 3 / 72)]
    yield "mean", f"{mean[0]:.1f}", f"{mean[1]:.1f}", "", ""
    frozen = 100 * (1 - 2 / 12)
    yield "frozen operator", f"{frozen:.1f}", f"{frozen:.1f}", 83, verdict(frozen, 83)


def printed_window(case: Case, gigabytes_per_s: float) -> int:
    """Return the window of Algorithm 1 as printed, with all operators of one size."""
    num_operators = case.num_layers * (case.num_experts + 2)
    each = case.num_parameters // num_operators
    compute, master, optimizer = case.sizes
    profile = OperatorProfile(
        num_operators=num_operators,
        iteration_s=case.iteration_s,
        compute_bytes=compute * each,
        master_bytes=master * each,
        optimizer_bytes=optimizer * each,
        pcie_bytes_per_s=gigabytes_per_s * 1e9,
    )
    return find_window_size(profile)[0]


def model_sizes(case: Case) -> PositionSizes:
    """Return experts, then layers without them, in their sizes, on one rank."""
    experts = case.num_layers * case.num_experts
    rest = (case.num_parameters - experts * case.expert_parameters) // case.num_layers
    counts = np.array([[case.expert_parameters] * experts + [rest] * case.num_layers])
    return PositionSizes(full=counts * sum(case.sizes[1:]), compute=counts * case.sizes[0])


def own_window(case: Case, gigabytes_per_s: float) -> int:
    """Return the window of planning/windows.py; longer than `LONGEST` if none fits."""
    budget = case.iteration_s * gigabytes_per_s * 1e9
    fit = shortest_window(model_sizes(case), budget, LONGEST)
    return fit.length if fit.fits else LONGEST + 1


def plain_window(case: Case, gigabytes_per_s: float) -> int:
    """Return how many iterations a dense snapshot takes."""
    dense = case.num_parameters * sum(case.sizes[1:])
    return math.ceil(dense / (gigabytes_per_s * 1e9) / case.iteration_s)


RULES: dict[str, Callable[[Case, float], int]] = {
    "Algorithm 1": printed_window,
    "ours, by bytes": own_window,
    "ceil(dense / iteration)": plain_window,
}


def window_rows() -> Iterator[Row]:
    """Yield W_sparse of Tables 3 and 7 with each rule and bandwidth, and where each rule gives it."""
    for case, (name, rule) in itertools.product((*TABLE_3, *TABLE_7), RULES.items()):
        cells = []
        for bandwidth in BANDWIDTHS:
            window = rule(case, bandwidth)
            says = "REPRODUCED" if window == case.window else "NOT"
            cells.append(f"{window} {says}")
        yield case.name, case.window, name, *cells, _range_of(case, rule)


def _range_of(case: Case, rule: Callable[[Case, float], int]) -> str:
    """Return the bandwidths with which a rule gives the printed window, to 0.1 GB/s."""
    grid = [tenth / 10 for tenth in range(5, 1000)]
    low = next((b for b in grid if rule(case, b) <= case.window), None)
    if low is None or rule(case, low) != case.window:
        return "none"
    high = next((b for b in grid if b > low and rule(case, b) < case.window), math.inf)
    return f"{low:.1f} to {high - 0.1:.1f}"


def count_windows() -> Iterator[Row]:
    """Yield how many of the printed windows each rule gives."""
    for name, rule in RULES.items():
        cells = []
        for table, bandwidth in itertools.product((TABLE_3, TABLE_7), BANDWIDTHS):
            right = sum(rule(case, bandwidth) == case.window for case in table)
            cells.append(f"{right} of {len(table)}")
        yield name, *cells


def memory_rows() -> Iterator[Row]:
    """Yield host memory in bytes per parameter (Table 6), without logs."""
    for case, (gemini, sparse) in zip(TABLE_3, HOST_MEMORY, strict=True):
        gemini, sparse = gemini / case.total, sparse / case.total
        more, sizes = case.window - 1, model_sizes(case)
        window = snapshot_bytes(sizes, cut_window(sizes, case.window).ends).sum()
        exact = 2 * float(window) / int(sizes.full.sum()) * 12
        estimates = (26 + more, 24 + 2 * more, exact, 26 + 2 * more)
        cells = (f"{each:.1f} {_near(each, sparse)}" for each in estimates)
        yield case.name, case.window, f"{gemini:.2f} {_near(26, gemini)}", f"{sparse:.2f}", *cells


def _near(ours: float, paper: float) -> str:
    """Compare figures of which the paper's follows from two rounded ones."""
    miss = ours / paper - 1
    word = "REPRODUCED" if abs(miss) < 0.005 else "CLOSE" if abs(miss) <= CLOSE else "NOT"
    return f"{word} ({100 * miss:+.1f} %)"


def slice_rows() -> Iterator[Row]:
    """Yield how large the largest snapshot is, in % of a dense one, with slices as ranks own them."""
    model = PRESETS["gpt-350m-16e"]
    for shape, dp, ep in (
        (model, 8, 8),
        (model, 16, 8),
        (model, 32, 8),
        (model, 64, 8),
        (replace(model, moe_layers=()), 8, 1),
    ):
        (units,) = stage_units(shape, 1)
        layout = SavingLayout(dp=dp, ep=ep)
        owned = position_sizes(units, layout, ByteModel())

        def draw(units: Units = units, layout: SavingLayout = layout) -> list[PositionSizes]:
            seeds = map(np.random.default_rng, range(_NUM_ORDERS))
            return [position_sizes(units, layout, ByteModel(), seed) for seed in seeds]

        with mock.patch("moe_ft.strategies.sparse.size.spread_over_ranks", _keep_order):
            by_popularity_alone = draw()
        spread_over_owners = draw()
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


def _table(rows: Iterator[Row], headers: Sequence[str]) -> str:
    return tabulate(list(rows), headers, "github", disable_numparse=True)


def paper_parts() -> list[str]:
    """Return what is compared with the paper."""
    bandwidths = [f"{each} GB/s" for each in BANDWIDTHS]
    window_headers = ("model", "paper", "rule", *bandwidths, "GB/s that give the paper's")
    tables = [f"Table {table}, {each}" for table in (3, 7) for each in bandwidths]
    memory_headers = ("model", "W", "Gemini: 26", "X", "26 + (W-1)", "24 + 2(W-1)")
    return [
        "Calculated: Fig. 6, six equal operators, W = 3: less than a dense snapshot, in %",
        _table(figure_6_rows(), ("snapshot", "Algorithm 1", "ours", "paper", "verdict")),
        "Calculated: W_sparse of Table 3 and, for DeepSeek-MoE with other precisions (compute, master, "
        "optimizer), of Table 7",
        _table(window_rows(), window_headers),
        _table(count_windows(), ("printed windows found", *tables)),
        "Calculated: host memory without logs, bytes per parameter (Table 6)",
        _table(memory_rows(), (*memory_headers, "ours: two windows as cut", "26 + 2(W-1)")),
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE.npz")
    parser.add_argument("--seeds", type=int, default=100, help="of the drawn loads")
    parser.add_argument("--repetitions", type=int, default=21, help="of what is timed")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    options = parser.parse_args()
    parts = [
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; median (range) of {options.seeds} "
        f"seeds and of {options.repetitions} repetitions. Python {platform.python_version()}, numpy "
        f"{np.__version__}.",
        *paper_parts(),
        f"Calculated, with drawn loads of {NUM_EXPERTS} experts: weight gradients of experts that a "
        "conversion skips, in %",
        _table(
            skewness_rows(options.seeds),
            ("layout", "W", "S", "ascending", "random", "descending", "ascending - random"),
        ),
    ]
    slice_headers = ("GPT-350M", "dp, ep", "W", "parts of every unit", "popularity alone")
    parts += [
        "Calculated: the largest snapshot of any rank, % of a dense one, with slices as Megatron's "
        f"distributed optimizer cuts them from one buffer; orders of popularity: {_NUM_ORDERS} drawn",
        _table(slice_rows(), (*slice_headers, "spread over owners")),
    ]
    if options.trace:
        tokens = tokens_of(load_routing(options.trace))
        check_against_strategy(tokens)
        variants = (("interpolated", tokens), ("drawn", redrawn(tokens)))
        rows = itertools.chain.from_iterable(trace_rows(each, name) for name, each in variants)
        headers = ("tokens", "W", "reorders", "measure", "times", "skipped, %")
        parts += [f"Played back: the routing trace, ep {EP_SIZE}", _table(rows, headers)]
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
            _table(module_rows(tokens), (*module_headers, *prices)),
        ]
    parts += [
        "Measured: planning, ms of processor time",
        _table(
            itertools.chain(cut_rows(options.repetitions), plan_rows(options.repetitions)),
            ("stage", "function", "ms"),
        ),
    ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
