"""Windows and host memory of MoEvement, calculated: Algorithm 1, W_sparse of Tables 3 and 7, Table 6.

The printed algorithm has only one size for all operators, tests only the copy over PCIe, keeps at least two
operators active whether they fit or not, and can leave the last snapshot nearly empty: training uses
sparse/windows.py. Verdicts: REPRODUCED if equal as far as it is printed, CLOSE within 5 %, else NOT.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_ft.errors import PlanError
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    cut_window,
    shortest_window,
    snapshot_bytes,
)

CLOSE = 0.05
BANDWIDTH = 20.8  # GB/s, fitted to the windows
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


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorProfile:
    """Input of the printed algorithm (lines 1 to 6); all operators are equal.

    Attributes:
        num_operators: O_Total, at least 1.
        iteration_s: T_Iter.
        compute_bytes: S_Compute, weights for the forward and backward pass, of an operator.
        master_bytes: S_Master, master weights of an operator.
        optimizer_bytes: S_Optim, optimizer state of an operator.
        pcie_bytes_per_s: B_PCIe, effective bandwidth from device to host, positive.
    """

    num_operators: int
    iteration_s: float
    compute_bytes: int
    master_bytes: int
    optimizer_bytes: int
    pcie_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.num_operators < 1 or self.pcie_bytes_per_s <= 0:
            raise PlanError(
                f"num_operators={self.num_operators} and pcie_bytes_per_s={self.pcie_bytes_per_s} "
                "must be positive"
            )

    def checkpoint_bytes(self, num_active: int, num_frozen: int) -> int:
        """Return the size of a snapshot with so many operators at FULL and at COMPUTE (lines 12 and 13)."""
        full_bytes = self.master_bytes + self.optimizer_bytes
        return full_bytes * num_active + self.compute_bytes * num_frozen


def find_window_size(profile: OperatorProfile) -> tuple[int, int]:
    """Return W_Sparse and O_Active as printed (FindWindowSize, lines 7 to 18).

    Args:
        profile: what line 8 gets from the profiler.
    """
    num_active = profile.num_operators  # 9
    while num_active > 2:  # 10
        num_frozen = profile.num_operators - num_active  # 11
        checkpoint_bytes = profile.checkpoint_bytes(num_active, num_frozen)  # 12, 13
        if checkpoint_bytes / profile.pcie_bytes_per_s <= profile.iteration_s:  # 14
            break  # 15
        num_active -= 1  # 16
    window = -(-profile.num_operators // num_active)  # 17
    return window, num_active  # 18


def printed_window(case: Case) -> int:
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
        pcie_bytes_per_s=BANDWIDTH * 1e9,
    )
    return find_window_size(profile)[0]


def model_sizes(case: Case) -> PositionSizes:
    """Return experts, then layers without them, in their sizes, on one rank."""
    experts = case.num_layers * case.num_experts
    rest = (case.num_parameters - experts * case.expert_parameters) // case.num_layers
    counts = np.array([[case.expert_parameters] * experts + [rest] * case.num_layers])
    return PositionSizes(full=counts * sum(case.sizes[1:]), compute=counts * case.sizes[0])


def own_window(case: Case) -> int:
    """Return the window of sparse/windows.py; longer than `LONGEST` if none fits."""
    budget = case.iteration_s * BANDWIDTH * 1e9
    cuts = shortest_window(model_sizes(case), budget, LONGEST)
    return cuts.length if cuts.largest_bytes <= budget else LONGEST + 1


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
