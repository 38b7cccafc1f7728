"""Links that the snapshots of a rank go through: how long training waits for them, and how late they arrive.

The machine need not exist. job_costs.py makes the costs of a job of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Links that a snapshot goes through, for each rank.

    Attributes:
        hidden_s: its forward and backward pass, during which state can be copied.
        bandwidth: from device to host, bytes per second.
        network_bandwidth: to other nodes, bytes per second; not used without replicas.
        sent_share: bytes that a peer gets for each byte of a snapshot: less where it gets gradients.
    """

    iteration_s: float
    hidden_s: float
    bandwidth: float
    network_bandwidth: float = math.inf
    replication_factor: int = 0
    sent_share: float = 1.0

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
        return self.network_bandwidth / self.replication_factor / self.sent_share

    @property
    def reading_bandwidth(self) -> float:
        """Bytes per second of the slower way back: from own memory to the device, or from a peer."""
        return min(self.bandwidth, self.network_bandwidth if self.replication_factor else math.inf)

    def stalls_s(self, snapshots: Sequence[float]) -> list[float]:
        """Return ``[snapshot]`` the time that the optimizer step waits for its copy."""
        return [max(0.0, size / self.bandwidth - self.hidden_s) for size in snapshots]

    def lag_iterations(self, snapshots: Sequence[float]) -> int:
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

    def overhead(self, snapshots: Sequence[float]) -> float:
        """Return the fraction by which windows, one after the other, lengthen training."""
        num_iterations = len(snapshots) + self.lag_iterations(snapshots)
        return sum(self.stalls_s(snapshots)) / (num_iterations * self.iteration_s)
