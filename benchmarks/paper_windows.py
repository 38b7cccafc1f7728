"""Sparse windows as MoEvement prints them (Algorithm 1).

Kept only as a tested reference for reproduction tables; training uses windows.py. The printed algorithm has
only one size for all operators, tests only the copy over PCIe, keeps at least two operators active whether
they fit or not, and can leave the last snapshot nearly empty. Comments give the line numbers of the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ft.errors import PlanError


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledSnapshot[Operator]:
    """One snapshot of the printed schedule.

    Attributes:
        active: operators whose master weights and optimizer state it holds.
        frozen: operators whose compute weights it holds.
    """

    active: tuple[Operator, ...]
    frozen: tuple[Operator, ...]


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


def generate_schedule[Operator](
    ordered: Sequence[Operator], window: int, num_active: int
) -> list[ScheduledSnapshot[Operator]]:
    """Return the snapshots of a window as printed (GenerateSchedule, lines 19 to 29).

    Args:
        ordered: operators by ascending popularity, which is what line 20 makes of them.
        window: W_Sparse.
        num_active: O_Active.
    """
    schedule = []  # 21
    for i in range(window):  # 22
        start = i * num_active  # 23
        end = min(start + num_active, len(ordered))  # 24
        snapshot = ScheduledSnapshot(  # 25
            active=tuple(ordered[start:end]),  # 26
            frozen=tuple(ordered[end:]),  # 27
        )
        schedule.append(snapshot)  # 28
    return schedule  # 29
