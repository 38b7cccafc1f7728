"""Notes of failures for which ranks were replaced in this start: they outlive processes and nodes.

A rank notes its failure in the job's store before its process ends. If the process in its place fails in the
same way, a third one would, too: all ranks end, or leave that iteration out. Its replacement tells the others
in its entry of a round, so that all of them know the same iterations.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from enum import Enum, auto
from typing import Any

from moe_ft.cluster.signed_store import SignedStore
from moe_ft.verdicts import LIKELY_AGAIN, Failure


class Consequence(Enum):
    """Consequence of a failure of a rank that can be replaced."""

    REPLACE = auto()  # the rank is replaced, and its iteration runs again
    LEAVE_OUT = auto()  # it is replaced, and all ranks leave that iteration out
    END = auto()  # all ranks end


class FailureNotes:
    """One connection's view of the notes. Used by one thread."""

    def __init__(self, store: SignedStore) -> None:
        self._store = store

    def answer(self, failure: Failure, may_leave_out: Callable[[], bool]) -> Consequence:
        """Note a failure unless all end, and return what follows it.

        Args:
            may_leave_out: returns whether the iteration may be left out, if it is not yet.
        """
        notes = [Failure.of(each) for each in self._store.values("replaced_for")]
        num_before = sum(map(failure.is_same, notes))
        if num_before and not (num_before == 1 and self._is_of_batch(failure, may_leave_out)):
            return Consequence.END
        self._store.add("replaced_for", asdict(failure))
        if not num_before:
            return Consequence.REPLACE
        self._store.add("left_out", asdict(failure))
        return Consequence.LEAVE_OUT

    def _is_of_batch(self, failure: Failure, may_leave_out: Callable[[], bool]) -> bool:
        is_known = failure.iteration in left_out_by(self.left_out())
        return failure.kind in LIKELY_AGAIN and (is_known or may_leave_out())

    def left_out(self) -> list[dict[str, Any]]:
        """Return the failures whose iterations are left out, as JSON values."""
        return self._store.values("left_out")


def left_out_by(failures: Iterable[Mapping[str, Any]]) -> dict[int, Failure]:
    """Return the iterations that are left out, each with a failure that its batch has led to."""
    return {each.iteration: each for each in map(Failure.of, failures)}
