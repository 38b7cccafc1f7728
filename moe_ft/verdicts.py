"""Verdict on an end of training: which rank failed first, how, and whether a restart can help.

Ranks report failures; `verdict_of` makes one verdict of them. Pure; standard library only.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any


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

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Failure":
        """Return the failure that a rank has reported as JSON."""
        return cls(**{**facts, "kind": FailureKind(facts["kind"])})

    @property
    def words(self) -> str:
        """Rank, node, iteration, kind and exception."""
        node = f" (node {self.node})" if self.node else ""
        return f"rank {self.rank}{node} in iteration {self.iteration}: {self.kind}: {self.what}"


# Sections in which the next start may continue from another state.
_RECOVERY = ("setup", "recovery")
# Of one kind and iteration, these come again. All ranks run the same code on data of their own.
_OF_ANY_RANK = (FailureKind.CODE, FailureKind.DATA)
LIKELY_AGAIN = (*_OF_ANY_RANK, FailureKind.OUT_OF_MEMORY)
# Kinds of failures that others cause: a rank is told to end because another one has failed.
_CAUSED = {FailureKind.NETWORK: 1, FailureKind.TIME_LIMIT: 2}
_UNLESS = "helps unless the same comes again: then"
_RESTART = {
    FailureKind.CODE: f"{_UNLESS} the code has to be mended",
    FailureKind.DATA: f"{_UNLESS} the data have to be mended, or the batch be left out",
    FailureKind.OUT_OF_MEMORY: f"{_UNLESS} it has to use less memory",
    FailureKind.DEVICE: "helps; on another node if the device fails again",
    FailureKind.NETWORK: "helps if the network works then",
    FailureKind.STORAGE: "helps once storage works",
    FailureKind.TIME_LIMIT: "continues where this one ended",
    FailureKind.CORRUPTION: "helps on other nodes",
    FailureKind.REFUSED: "does not help",
}


def first_of(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure that has caused the others: by kind, then by time, as clocks differ."""
    return min(
        failures, key=lambda each: (_CAUSED.get(each.kind, 0), each.time_s, each.rank), default=None
    )


def comes_again(failure: Failure | None, before: Failure | None) -> bool:
    """Return whether a failure is that of the start before, and would end the next one, too.

    Not in a recovery, nor after a rejected result: recovery/failures.py then passes over the state.
    """
    if failure is None or before is None or failure.kind not in LIKELY_AGAIN:
        return False
    if failure.section in _RECOVERY:
        return False
    if failure.kind in _OF_ANY_RANK:
        before = replace(before, rank=failure.rank)
    return failure.is_same(before)


def is_repeated(failures: Sequence[Failure], before: Failure | None) -> bool:
    """Return whether the first failure of a start comes again.

    It is that of the start before, or its rank was replaced for it in this one, and has failed again.
    """
    first = first_of(failures)
    again = [each for each in failures if first and each is not first and first.is_same(each)]
    return any(comes_again(first, each) for each in (before, *again))


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Verdict on an end of training.

    Attributes:
        first: the failure that has caused the others.
        ranks: that may have failed first, ascending: several if all of them are silent.
        waits: collectives that others wait in, or that some have not joined, in words.
    """

    first: Failure
    ranks: tuple[int, ...]
    waits: str = ""

    @property
    def is_caused(self) -> bool:
        """True if nobody knows of a failure that no other one has caused."""
        return self.first.kind in _CAUSED

    @property
    def restart(self) -> str:
        """Effect of a restart, in words."""
        return _RESTART.get(self.first.kind, "helps")

    def __str__(self) -> str:
        several = f"one of {named_ranks(self.ranks)}, such as " if len(self.ranks) > 1 else ""
        waits = f"; {self.waits}" if self.waits else ""
        return f"{several}{self.first.words}{waits}. A restart {self.restart}"


def verdict_of(
    failures: Collection[Failure],
    silent: Sequence[int] = (),
    *,
    timed_out: bool = False,
    waits: Mapping[int, str] | None = None,
    absent: Mapping[str, Sequence[int]] | None = None,
) -> Verdict:
    """Return the verdict on the failures of a start, of which there is one at least.

    Args:
        silent: ranks that have reported nothing although they had the time, or are seen to be gone.
        timed_out: whether some rank has waited for another one for too long: a rank that died is noticed.
        waits: what ranks that have not failed themselves were in, by rank.
        absent: ranks that have not joined a collective, by its name.
    """
    first, suspects = first_of(failures), tuple(silent)
    assert first is not None, "no rank has failed"
    missing = {rank for ranks in (absent or {}).values() for rank in ranks}
    by_wait: dict[str, list[int]] = {}
    for rank, wait in (waits or {}).items():
        by_wait.setdefault(wait, []).append(rank)
    words = [f"{named_ranks(ranks)} wait in {wait}" for wait, ranks in by_wait.items()]
    words += [f"{named_ranks(ranks)} did not join {name}" for name, ranks in (absent or {}).items()]
    ranks: tuple[int, ...] = (first.rank,)
    if first.kind is FailureKind.CORRUPTION:  # of two that differ nobody knows which one it is
        ranks = tuple(sorted(each.rank for each in failures if each.kind is first.kind))
    if first.kind in _CAUSED and suspects:
        ranks = tuple(each for each in suspects if each in missing) or suspects
        kind = FailureKind.HANG if timed_out else FailureKind.KILLED
        what = f"it gave no sign of life{' while others waited for it' if timed_out else ''}"
        first = replace(first, rank=ranks[0], kind=kind, what=what, node="")
    return Verdict(first=first, ranks=ranks, waits="; ".join(words))


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, consecutive ones as a range."""
    runs = (
        [rank for _, rank in found]
        for _, found in groupby(enumerate(sorted(ranks)), lambda each: each[1] - each[0])
    )
    names = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    is_one = len(names) == 1 and "-" not in names[0]
    return f"rank{'' if is_one else 's'} {', '.join(names)}"
