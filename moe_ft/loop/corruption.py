"""Findings of checks against silent corruption: an event, a line in words, and the end of training.

moe_ft/loop/weight_check.py compares weights; iterations that another rank repeats are
megatron/fault_tolerance. Here is what all of them do with what they find.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from moe_ft.cluster.failures import report_failure
from moe_ft.cluster.member import own_assignment
from moe_ft.errors import CorruptionError
from moe_ft.events import EventLog
from moe_ft.loop.listeners import LoopState
from moe_ft.saying import warn
from moe_ft.verdicts import Failure, FailureKind


class Check(StrEnum):
    """Checks that find corruption."""

    AT_REST = "weights at rest"
    EQUAL = "equal weights"
    ITERATION = "iteration"
    REPLICA = "replica"  # engine/updates/following.py reports it; training goes on


_WORDS = {
    Check.AT_REST: "memory of its weights or moments changed between two optimizer steps",
    Check.EQUAL: "its weights are not those of ranks that must have the same",
    Check.REPLICA: "peers that repeat an optimizer step get other bits",
    Check.ITERATION: "another rank computes other results for its iteration",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Corruption that a check has found, the same on all ranks that know of it.

    Attributes:
        ranks: that may be corrupt, ascending.
        is_decided: whether all of `ranks` are, and not one of them that nobody knows.
        where: parameter or group, in words.
        since: the last iteration whose check passed; None if none has in this start.
    """

    check: Check
    ranks: Sequence[int]
    is_decided: bool
    where: str
    since: int | None

    def sound_in(self, iteration: int) -> int | None:
        """Return the latest iteration whose state surely lacks the damage; None for any, or if nobody knows.

        Args:
            iteration: that runs.
        """
        is_new = self.check is Check.AT_REST or self.since == iteration - 1
        return iteration - 1 if is_new and self.check is not Check.ITERATION else None

    def __str__(self) -> str:
        *others, last = map(str, self.ranks)
        link = "and" if self.is_decided else "or"
        names = f"{', '.join(others)} {link} {last}" if others else last
        verb = "are" if others and self.is_decided else "is"
        since = f"; the last check that passed was of iteration {self.since}"
        return (
            f"rank {names} {verb} corrupt: {_WORDS[self.check]} ({self.where})"
            f"{'' if self.since is None else since}"
        )


def accuse(log: EventLog, loop: LoopState, finding: Finding, *, speaker: int = 0) -> NoReturn:
    """Report a finding, and end the iteration. Called before the optimizer's step by all ranks of the job.

    Args:
        speaker: rank that prints the line.

    Raises:
        CorruptionError: always.
    """
    log.write(
        "corruption",
        loop.iteration,
        check=finding.check.value,
        ranks=list(finding.ranks),
        decided=finding.is_decided,
        where=finding.where,
        since=finding.since,
    )
    line = f"iteration {loop.iteration}: {finding}"
    assignment = own_assignment()
    if assignment is not None and finding.is_decided and log.rank in finding.ranks:
        failure = Failure(
            rank=log.rank,
            kind=FailureKind.CORRUPTION,
            what=f"{_WORDS[finding.check]} ({finding.where})",
            iteration=loop.iteration,
            section=loop.section.value,
            node=assignment.node,
            time_s=time.time(),
        )
        report_failure(assignment, failure)  # its node gets no ranks any more
    if log.rank == speaker:
        warn(line)
    raise CorruptionError(line, tuple(finding.ranks), finding.sound_in(loop.iteration))
