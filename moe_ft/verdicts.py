"""Verdict on an end of training: which rank failed first, how, and whether a restart can help.

Ranks report failures; `verdict_of` makes one verdict of them. Pure; standard library only.
"""

from dataclasses import dataclass
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
