"""Mistakes about exceptions of single ranks: the simulation of repairs must find each of them."""

from typing import Any

from moe_ft.cluster.failure_notes import Answer, FailureNotes
from moe_ft.cluster.rounds import Entry
from tests.simulation.active import Patches
from tests.simulation.mutations import Mutation, name_of
from tests.simulation.repairs.mutations import repair_mutation
from tests.simulation.repairs.product import Member, OwnErrors

OF_ERRORS: set[str] = set()


def error_mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list of all, and note that batches which a rank cannot run show it."""
    OF_ERRORS.add(name_of(make))
    return repair_mutation(make)


@error_mutation
def same_error_repaired_for_ever(patches: Patches) -> None:
    """A rank is replaced for the same exception in the same iteration again and again."""
    patches.set(FailureNotes, "answer", lambda self, failure, may_leave_out: Answer.REPLACE)


@error_mutation
def iterations_left_out_before_unknown_to_replacements(patches: Patches) -> None:
    """A replacement leaves out only iterations for which its own rank was replaced."""
    original = Entry.__init__

    def begin(self: Any, *, rank: int, left_out: Any = (), **given: Any) -> None:
        own = [each for each in left_out if each["rank"] == rank]
        original(self, rank=rank, left_out=own, **given)

    patches.set(Entry, "__init__", begin)


@error_mutation
def other_iteration_left_out_by_replacements(patches: Patches) -> None:
    """A replacement counts what it leaves out from 1, and the others from 0."""
    original = Member.meet

    def meet(self: Any) -> Any:
        met = original(self)
        if self.is_replacement:
            self.left_out = {each + 1: failure for each, failure in met.left_out.items()}
        return met

    patches.set(Member, "meet", meet)


@error_mutation
def own_errors_end_all(patches: Patches) -> None:
    """A rank that raises an exception of its own is not replaced."""
    patches.set(OwnErrors, "end_if_own", lambda self, error: self._member.link.disarm())
