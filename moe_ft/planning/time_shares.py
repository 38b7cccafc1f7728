"""Shares of the time of a job: the one vocabulary of plans, simulations and reports of runs.

Here they are calculated from costs. moe_ft/simulate draws failures over these, and `moe_ft report` reads them
from an event log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
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
