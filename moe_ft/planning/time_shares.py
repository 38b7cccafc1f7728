"""Shares of the time of a job: the one vocabulary of plans, simulations and reports of runs.

Here they are calculated from costs, and noted as a run goes: for TensorBoard, and for `moe_ft report`, which
reads an event log. moe_ft/simulate draws failures over the costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

from moe_ft.planning.costs import Costs, RecoveryKind, ettr


class Spent(StrEnum):
    """Uses of the time of a job. Together they are all of it."""

    PRODUCTIVE = "productive"
    BLOCKED = "blocked"
    REDONE = "redone"
    RECOVERING = "recovering"
    WAITING = "waiting"


MEANINGS: Mapping[Spent, str] = {
    Spent.PRODUCTIVE: "iterations for the first time",
    Spent.BLOCKED: "waiting for checkpoints during these: stalls, fences, barriers",
    Spent.REDONE: "iterations again, replays included: work that failures discarded",
    Spent.RECOVERING: "from failures until state is back",
    Spent.WAITING: "waiting for machines",
}
# BadputType of ml-goodput-measurement 0.2 (AI-Hypercomputer), whose names dashboards know.
_BADPUT: Mapping[str, tuple[Spent, ...]] = {
    "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME": (Spent.BLOCKED,),
    "WASTED_PROGRESS_FROM_DISRUPTION": (Spent.REDONE,),
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": (Spent.RECOVERING, Spent.WAITING),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeShares:
    """Shares of the time of a job by use, 1 in all. The productive one is ETTR."""

    productive: float
    blocked: float = 0.0
    redone: float = 0.0
    recovering: float = 0.0
    waiting: float = 0.0

    @classmethod
    def of(cls, seconds: Mapping[Spent, float]) -> "TimeShares":
        """Return the shares of seconds by use; all is productive where there are none."""
        total = sum(seconds.values())
        if not total:
            return cls(productive=1.0)
        return cls(**{use.value: seconds.get(use, 0.0) / total for use in Spent})

    @classmethod
    def mean(cls, shares: "list[TimeShares]") -> "TimeShares":
        """Return the mean of several, at least one."""
        names = [each.name for each in fields(cls)]
        return cls(
            **{name: sum(getattr(one, name) for one in shares) / len(shares) for name in names}
        )

    def __getitem__(self, use: Spent) -> float:
        """Return one share."""
        return float(getattr(self, use.value))

    @property
    def badput(self) -> dict[str, float]:
        """The shares that are not productive, by BadputType of ml-goodput-measurement."""
        return {name: sum(self[use] for use in uses) for name, uses in _BADPUT.items()}


@dataclass(kw_only=True, slots=True)
class TimeSpent:
    """Uses of the time of a run so far, from its first iteration on, as one rank sees them.

    Evaluation and logging between iterations count as productive. A rank cannot tell recoveries from waits
    for machines: the time between the iterations of two starts is that of recoveries, but for their replays.

    Attributes:
        seconds: by use.
        reached: the latest iteration that was done.
        ended_s: when the last one ended, in seconds since 1970; 0 before it.
        last: the last one, which a start may have gone back to.
        is_first: whether the next one is the first one of a start.
    """

    seconds: dict[Spent, float] = field(default_factory=lambda: dict.fromkeys(Spent, 0.0))
    reached: int = 0
    ended_s: float = 0.0
    last: int = 0
    is_first: bool = True
    _replay_s: float = 0.0

    def start(self) -> None:
        """Note a start; the next iteration is its first one."""
        self.is_first = True

    def recover(self, replay_s: float) -> None:
        """Note the seconds that a recovery has replayed for."""
        self._replay_s += replay_s

    def add(
        self, iteration: int, ended_s: float, iteration_s: float, stall_s: float
    ) -> list[tuple[Spent, float, float]]:
        """Divide the time since the iteration before; return the spans, in seconds since 1970.

        They have no gaps but for the time that a rank was out of the job while others trained.

        Args:
            iteration: those since the last one that a reader has left out were as this one.
            ended_s: in seconds since 1970.
        """
        begin_s = min(self.ended_s or ended_s - iteration_s, ended_s)
        # One iteration may have ended a rank before it was noted; more have others trained without this rank.
        if self.is_first and iteration > self.reached + 2:
            begin_s = ended_s - iteration_s
        spans, num = [], 1
        if self.is_first:
            resumed_s = max(begin_s, ended_s - iteration_s)
            replayed_s = max(begin_s, resumed_s - self._replay_s)
            spans.append((Spent.RECOVERING, begin_s, replayed_s))
            spans.append((Spent.REDONE, replayed_s, resumed_s))
            begin_s = resumed_s
        elif iteration > self.last:
            num = iteration - self.last
        if num_again := min(num, max(0, self.reached - (iteration - num))):
            again_s = begin_s + (ended_s - begin_s) * num_again / num
            spans.append((Spent.REDONE, begin_s, again_s))
            begin_s = again_s
        if num_new := num - num_again:
            step_s = max(begin_s, ended_s - num_new * stall_s)
            spans.append((Spent.PRODUCTIVE, begin_s, step_s))
            spans.append((Spent.BLOCKED, step_s, ended_s))
        for use, start_s, end_s in spans:
            self.seconds[use] += end_s - start_s
        self.last = iteration
        self.ended_s = ended_s
        self.reached = max(self.reached, iteration)
        self.is_first = False
        self._replay_s = 0.0
        return spans

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that `continue_from` takes."""
        return self.reached, self.ended_s, *self.seconds.values()

    @classmethod
    def continue_from(cls, numbers: Sequence[float]) -> "TimeSpent":
        """Return what an earlier process has noted; nothing if these are not its numbers."""
        if len(numbers) != 2 + len(Spent):
            return cls()
        reached, ended_s, *seconds = numbers
        by_use = dict(zip(Spent, seconds, strict=True))
        return cls(seconds=by_use, reached=int(reached), ended_s=ended_s)


def calculate_shares(costs: Costs, kind: RecoveryKind, mtbf_s: float) -> TimeShares:
    """Return the shares that follow from mean costs, with failures only while the job trains.

    Args:
        mtbf_s: of the job.

    Source: MoEvement, section 2.4; docs/simulate.md says which ETTR this is.
    """
    productive = ettr(costs.overhead, costs.failure_s(kind), mtbf_s)
    running, recovery = productive * (1 + costs.overhead), costs.recoveries[kind]
    return TimeShares(
        productive=productive,
        blocked=running - productive,
        redone=running * (recovery.replay_s + costs.redo_s(kind)) / mtbf_s,
        recovering=running * recovery.ready_s / mtbf_s,
    )
