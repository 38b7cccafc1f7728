"""Mistakes about exceptions of single ranks, and nodes that compute wrongly: simulation must find all."""

from dataclasses import replace
from typing import Any

from moe_ft.cluster import failures, law
from moe_ft.cluster.failures import Consequence, FailureNotes
from moe_ft.cluster.membership import Job
from moe_ft.cluster.rounds import Entry
from tests.simulation.active import Patches
from tests.simulation.mutations import Mutation, name_of
from tests.simulation.repairs.mutations import repair_mutation
from tests.simulation.repairs.product import Member, OwnErrors

OF_ERRORS: set[str] = set()
OF_CORRUPT: set[str] = set()


def error_mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list of all, and note that batches which a rank cannot run show it."""
    OF_ERRORS.add(name_of(make))
    return repair_mutation(make)


def corrupt_mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list of all, and note that nodes which compute wrongly show it."""
    OF_CORRUPT.add(name_of(make))
    return repair_mutation(make)


@error_mutation
def same_error_repaired_for_ever(patches: Patches) -> None:
    """A rank is replaced for the same exception in the same iteration again and again."""
    patches.set(FailureNotes, "answer", lambda self, failure, may_leave_out: Consequence.REPLACE)


@error_mutation
def iterations_left_out_before_unknown_to_replacements(patches: Patches) -> None:
    """A replacement leaves out only iterations for which its own rank was replaced."""
    original = Member._entry

    def entry(self: Member) -> Entry:
        made = original(self)
        own = [each for each in made.left_out if each["rank"] == self.rank]
        return replace(made, left_out=own)

    patches.set(Member, "_entry", entry)


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


@corrupt_mutation
def wrong_results_have_no_consequence(patches: Patches) -> None:
    """A node whose rank computes wrongly keeps its ranks."""
    patches.set(law, "why_unfit", lambda job, failure: "")


@corrupt_mutation
def nodes_that_compute_wrongly_are_spares(patches: Patches) -> None:
    """A node that was replaced because a rank computed wrongly gets ranks again."""
    patches.set(Job, "fit", property(lambda self: self.nodes))


@corrupt_mutation
def reports_of_failures_unread(patches: Patches) -> None:
    """Nobody reads what ranks report of how they have failed."""
    patches.set(failures.Reported, "new", lambda self: ())
