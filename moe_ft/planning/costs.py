"""Numbers that a strategy costs a job: what it blocks, moves and holds, and what each kind of recovery takes.

Pure: a strategy makes them (`StrategyKind.costs`), `plan` words them, `simulate` draws failures over them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class RecoveryKind(StrEnum):
    """Way from a failure to the next iteration."""

    RESTART = "restart"  # all processes start again
    KEEP = "keep"  # a kept process forks all ranks again
    REPAIR = "repair"  # dead ranks are replaced, the others stay
    LOCAL = "local"  # as repair, and only the dead rank's stage computes again
    ELASTIC = "elastic"  # the ranks that are left continue in another layout


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryCosts:
    """Seconds of one recovery, by phase; 0 for a phase that it lacks.

    Attributes:
        notice_s: from the failure until the others know of it.
        processes_s: until all ranks run, imports included.
        groups_s: until process groups and the model are built.
        state_s: until state is read and put back.
        replay_s: replays that turn a window into one iteration's state.
        redo_share: of the time of an iteration that runs again; below 1 where only one stage computes.
    """

    notice_s: float = 0.0
    processes_s: float = 0.0
    groups_s: float = 0.0
    state_s: float = 0.0
    replay_s: float = 0.0
    redo_share: float = 1.0

    @property
    def ready_s(self) -> float:
        """Seconds until state is back, and iterations run again."""
        return self.notice_s + self.processes_s + self.groups_s + self.state_s

    @property
    def fixed_s(self) -> float:
        """Seconds that a recovery takes whenever the failure was: with the replays of a window."""
        return self.ready_s + self.replay_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredStates:
    """States on storage, which a recovery takes where all copies in memory are lost.

    Attributes:
        interval: iterations from one to the next.
        lag: iterations from a state's last snapshot until it is written.
        state_s: until it is read and put back.
    """

    interval: float
    lag: float
    state_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Costs of one strategy for one job.

    Attributes:
        iteration_s: without fault tolerance.
        blocked_s: that an iteration waits for checkpointing on average.
        interval: iterations from one state that a recovery can begin with to the next.
        window: iterations whose snapshots make up one state; 1 unless the strategy rotates units.
        lag: iterations from a state's last snapshot until it can be recovered after the loss of a node.
        snapshot_bytes: that the rank with the most copies in an iteration, on average.
        peer_bytes: that it sends to other nodes in an iteration, on average.
        storage_bytes: that it writes to storage in an iteration, on average.
        host_bytes: host memory of the rank with the most, its peers' replicas included.
        lost_token_share: tokens of which a recovery loses the training, as a share of those of an iteration
            and for each iteration of `mean_redone`; 0 where recoveries are exact.
        recoveries: those that the job can have; a restart always.
        nodes_lost: nodes next to each other on the ring of replicas that may be lost at once; None for any,
            as states are on storage.
        stored: states on storage, where memory has the newer ones; None without.
    """

    strategy: str
    iteration_s: float
    blocked_s: float
    interval: float
    window: int
    lag: float
    snapshot_bytes: float
    peer_bytes: float
    storage_bytes: float
    host_bytes: float
    lost_token_share: float
    recoveries: Mapping[RecoveryKind, RecoveryCosts]
    nodes_lost: int | None = None
    stored: StoredStates | None = None

    @property
    def overhead(self) -> float:
        """Fraction by which checkpointing lengthens an iteration."""
        return self.blocked_s / self.iteration_s

    @property
    def mean_redone(self) -> float:
        """Iterations that a failure at a random instant makes run again, replays included.

        Between states the mean is half an interval; a window's own iterations and its lag come on top. The
        window's are those of `RecoveryCosts.replay_s`: who adds that leaves window - 1 iterations out here.
        """
        return self.interval / 2 + (self.window - 1) + self.lag

    def redo_s(self, kind: RecoveryKind) -> float:
        """Return the seconds in which iterations run again after a failure on average, without replays."""
        num_iterations = self.mean_redone - (self.window - 1)
        step_s = self.iteration_s + self.blocked_s
        return num_iterations * self.recoveries[kind].redo_share * step_s

    def failure_s(self, kind: RecoveryKind) -> float:
        """Return the seconds that a failure costs on average: E[R] of MoEvement, with the restart."""
        return self.recoveries[kind].fixed_s + self.redo_s(kind)

    @property
    def fastest(self) -> RecoveryKind:
        """The recovery that costs the least."""
        return min(self.recoveries, key=self.failure_s)

    @property
    def lost_iterations(self) -> float:
        """Iterations of tokens whose training a failure loses on average."""
        return self.lost_token_share * self.mean_redone


def ettr(overhead: float, recovery_s: float, mtbf_s: float) -> float:
    """Return the effective training time ratio: the share of the time in which training gets ahead.

    Args:
        overhead: fraction by which checkpoints lengthen training.
        recovery_s: E[R], that a failure costs on average.

    Source: MoEvement, section 2.4 and Appendix C.
    """
    return 1 / (1 + overhead) / (1 + recovery_s / mtbf_s)
