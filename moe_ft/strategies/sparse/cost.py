"""Time that sparse windows cost: stalls of training, recoveries, and the training time that is left.

The machine need not exist. size.py has the bytes of windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ft.strategies.sparse.size import WindowSize

WEIGHT_GRADIENT_SHARE = 1 / 3  # of a layer's matrix products: forward, input and weight gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Links that a snapshot goes through, for each rank.

    Attributes:
        hidden_s: its forward and backward pass, during which state can be copied.
        bandwidth: from device to host, bytes per second.
        network_bandwidth: to other nodes, bytes per second; not used without replicas.
    """

    iteration_s: float
    hidden_s: float
    bandwidth: float
    network_bandwidth: float = math.inf
    replication_factor: int = 0

    @property
    def budget_bytes(self) -> float:
        """The largest snapshot that costs no time.

        Source: MoEvement, Algorithm 1, line 14, which leaves replication out.
        """
        return min(self.hidden_s * self.bandwidth, self.iteration_s * self.replication_bandwidth)

    @property
    def replication_bandwidth(self) -> float:
        """Bytes of a snapshot that all peers get in a second, infinite without replicas."""
        if not self.replication_factor:
            return math.inf
        return self.network_bandwidth / self.replication_factor

    def stalls_s(self, snapshots: Sequence[int]) -> list[float]:
        """Return ``[snapshot]`` the time that the optimizer step waits for its copy."""
        return [max(0.0, size / self.bandwidth - self.hidden_s) for size in snapshots]

    def lag_iterations(self, snapshots: Sequence[int]) -> int:
        """Return the iterations from a window's last snapshot until its peers have all of it.

        The copy of the last snapshot does not count: it is done by the next optimizer step. Snapshots are
        sent one after the other, each while the next is copied. The time of a commit is left out. No window
        begins before the previous one is complete.
        """
        start = sent = fence = 0.0
        for size, stall_s in zip(snapshots, self.stalls_s(snapshots), strict=True):
            sent = max(sent, start + size / self.bandwidth) + size / self.replication_bandwidth
            fence = start + self.hidden_s + stall_s
            start += self.iteration_s + stall_s
        return max(0, math.ceil((sent - fence) / self.iteration_s - 1e-9))

    def overhead(self, snapshots: Sequence[int]) -> float:
        """Return the fraction by which windows, one after the other, lengthen training."""
        num_iterations = len(snapshots) + self.lag_iterations(snapshots)
        return sum(self.stalls_s(snapshots)) / (num_iterations * self.iteration_s)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Average cost of a failure, in seconds.

    Attributes:
        restart_s: until the processes run again, detection included.
        conversion_s: replays until every unit is at FULL, as if no unit were frozen.
        redo_s: iterations that run again after that.
        frozen_s: time that frozen units save in the conversion at best.
    """

    restart_s: float
    restore_s: float
    conversion_s: float
    redo_s: float
    frozen_s: float

    @property
    def expected_s(self) -> float:
        """E[R], without what frozen units save."""
        return self.restart_s + self.restore_s + self.conversion_s + self.redo_s


def expect_recovery(
    window: WindowSize, machine: Machine, works: Sequence[npt.NDArray[np.float64]], restart_s: float
) -> Recovery:
    """Return the cost of a failure.

    A window of W snapshots is converted by W - 1 replays (recovery/restore.py; MoEvement, section 3.3,
    has one more). The window is read over the slower of the two ways: from own memory to the device, or from
    a peer of a lost node. At best a frozen unit costs no weight gradient, and the slowest stage, which all
    wait for, does nothing else but matrix products.

    Args:
        works: ``[stage][position]`` as of `position_work`.
    """
    slowest = machine.bandwidth
    if machine.replication_factor:
        slowest = min(slowest, machine.network_bandwidth)
    _, mean, _ = work_to_redo(window.length, machine.lag_iterations(window.snapshots))
    num_replays = window.length - 1
    frozen = sum(
        min(
            _frozen_share(work, cuts.ends[replay])
            for work, cuts in zip(works, window.cuts, strict=True)
        )
        for replay in range(num_replays)
    )
    return Recovery(
        restart_s=restart_s,
        restore_s=window.window_bytes / slowest,
        conversion_s=num_replays * machine.iteration_s,
        redo_s=(mean - num_replays) * machine.iteration_s,
        frozen_s=frozen * WEIGHT_GRADIENT_SHARE * machine.iteration_s,
    )


def _frozen_share(work: npt.NDArray[np.float64], end: int) -> float:
    total = float(work.sum())
    return float(work[end:].sum()) / total if total else 0.0


def ettr(overhead: float, recovery_s: float, mtbf_s: float) -> float:
    """Return the effective training time ratio.

    Args:
        overhead: fraction by which checkpoints lengthen training.
        recovery_s: E[R], that a failure costs on average.

    Source: MoEvement, section 2.4 and Appendix C.
    """
    return 1 / (1 + overhead) / (1 + recovery_s / mtbf_s)
