"""Verdict on an end of training: which rank failed first, how, and whether a restart can help.

Ranks report failures; `verdict_of` makes one verdict of them. Pure; standard library only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class FailureKind(StrEnum):
    """Kinds of failures of a rank."""

    CODE = "code"  # an exception of the model, the loop or of moe_ft
    DATA = "data"  # an exception while a batch was read
    OUT_OF_MEMORY = "out of memory"  # of the device or the host
    DEVICE = "device"  # CUDA or the driver reports an error of the device
    NETWORK = "network"  # a collective failed or timed out, mostly since another rank was gone
    STORAGE = "storage"
    HANG = "hang"  # the training thread made no progress
    KILLED = "killed"  # a signal, without a word
    TIME_LIMIT = "time limit"  # the launcher or the scheduler told it to end
    CORRUPTION = "corruption"  # a check has found that it computes or holds other bits than it must
    REFUSED = "refused"  # flags or state that cannot work
    REJECTED = "rejected result"  # Megatron's checks have found NaN, infinity or a spike


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Failure of one rank in one iteration.

    Attributes:
        what: the exception in a form that is the same when it happens again, or words.
        iteration: that was running, or that was to run next.
        section: of the training loop (moe_ft/faults.py).
        node: name of its node; empty if nobody knows.
        time_s: since 1970.
    """

    rank: int
    kind: FailureKind
    what: str
    iteration: int
    section: str = ""
    node: str = ""
    time_s: float = 0.0

    def is_same(self, other: "Failure") -> bool:
        """Return whether this is the same error of the same rank in the same iteration."""
        return (self.rank, self.kind, self.what, self.iteration) == (
            other.rank,
            other.kind,
            other.what,
            other.iteration,
        )

    @property
    def words(self) -> str:
        """Rank, node, iteration, kind and exception."""
        node = f" (node {self.node})" if self.node else ""
        return f"rank {self.rank}{node} in iteration {self.iteration}: {self.kind}: {self.what}"


_RECOVERY = (
    "setup",
    "recovery",
)  # sections in which the next start may continue from another state
# Of one kind and iteration, these come again. All ranks run the same code on data of their own.
_OF_ANY_RANK = (FailureKind.CODE, FailureKind.DATA)
_AGAIN = (*_OF_ANY_RANK, FailureKind.OUT_OF_MEMORY)
# Kinds of failures that others cause: a rank is told to end because another one has failed.
_CAUSED = {FailureKind.NETWORK: 1, FailureKind.TIME_LIMIT: 2}


def first_of(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that has caused the others: by kind, then by time, as clocks differ."""
    return min(
        failures, key=lambda each: (_CAUSED.get(each.kind, 0), each.time_s, each.rank), default=None
    )


def comes_again(failure: Failure | None, before: Failure | None) -> bool:
    """Return whether a failure is that of the start before, and would end the next one, too.

    Not in a recovery, nor after a rejected result: recovery/failures.py then passes over the state.
    """
    if failure is None or before is None or failure.kind not in _AGAIN:
        return False
    if failure.section in _RECOVERY:
        return False
    if failure.kind in _OF_ANY_RANK:
        before = replace(before, rank=failure.rank)
    return failure.is_same(before)
