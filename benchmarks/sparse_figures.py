"""MoEvement's figures about sparse windows, calculated: Fig. 6, and W_sparse and memory of Tables 3, 6 and 7.

Verdicts: REPRODUCED if equal when rounded or cut off as printed, CLOSE within 5 % of the printed figure
(windows: never), else NOT. benchmarks/sparse_schedule.py prints them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.output import markdown_table
from benchmarks.paper_windows import OperatorProfile, find_window_size, generate_schedule
from benchmarks.sparse_orders import equal_operators
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    cut_window,
    shortest_window,
    snapshot_bytes,
)

CLOSE = 0.05
BANDWIDTHS = (
    20.8,
    21.8,
    15.1,
)  # GB/s; the first two are fitted, the last follows from Table 7 (MoC)
LONGEST = 64

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
    """Return the window of sparse/windows.py; longer than `LONGEST` if none fits."""
    budget = case.iteration_s * gigabytes_per_s * 1e9
    cuts = shortest_window(model_sizes(case), budget, LONGEST)
    return cuts.length if cuts.largest_bytes <= budget else LONGEST + 1


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


def paper_parts() -> list[str]:
    """Return what is compared with the paper."""
    bandwidths = [f"{each} GB/s" for each in BANDWIDTHS]
    window_headers = ("model", "paper", "rule", *bandwidths, "GB/s that give the paper's")
    tables = [f"Table {table}, {each}" for table in (3, 7) for each in bandwidths]
    memory_headers = ("model", "W", "Gemini: 26", "X", "26 + (W-1)", "24 + 2(W-1)")
    return [
        "Calculated: Fig. 6, six equal operators, W = 3: less than a dense snapshot, in %",
        markdown_table(figure_6_rows(), ("snapshot", "Algorithm 1", "ours", "paper", "verdict")),
        "Calculated: W_sparse of Table 3 and, for DeepSeek-MoE with other precisions (compute, master, "
        "optimizer), of Table 7",
        markdown_table(window_rows(), window_headers),
        markdown_table(count_windows(), ("printed windows found", *tables)),
        "Calculated: host memory without logs, bytes per parameter (Table 6)",
        markdown_table(memory_rows(), (*memory_headers, "ours: two windows as cut", "26 + 2(W-1)")),
    ]
