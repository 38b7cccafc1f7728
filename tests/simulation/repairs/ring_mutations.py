"""Mistakes in what nodes see of each other's kernels: the simulation of repairs must find each of them."""

from typing import Any

from moe_ft.cluster import ring, roster
from moe_ft.cluster.membership import Quiet
from tests.simulation.active import Patches
from tests.simulation.mutations import Mutation, name_of
from tests.simulation.repairs.mutations import node_mutation

OF_RING: set[str] = set()


def ring_mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list of all, and note that lost or silent nodes show it."""
    OF_RING.add(name_of(make))
    return node_mutation(make)


@ring_mutation
def one_observer_is_enough(patches: Patches) -> None:
    """A node is lost when one of those that watch it misses it."""
    patches.set(ring, "_NUM_WITNESSES", 1)


@ring_mutation
def unheard_observers_are_not_there(patches: Patches) -> None:
    """A node is lost when all who watch it and were heard miss it, although others watch it, too."""

    def missed(nodes: Any, quiet: Quiet, store: int) -> tuple[list[str], str]:
        watched = ring.watched_by(nodes)
        found = []
        for id in quiet.silent_s:
            heard = [each for each, ids in watched.items() if id in ids and each in quiet.heard]
            if heard and all(id in nodes[each].missed for each in heard):
                found.append(id)
        return found, "silent, agent and kernel"

    patches.set(ring, "missed", missed)


@ring_mutation
def own_beats_do_not_count(patches: Patches) -> None:
    """A node is lost when those that watch it miss it, although it beats."""
    original = roster.NodeRoster._silences

    def silences(self: Any, is_suspected: Any) -> Any:
        yield from original(self, is_suspected)
        yield Quiet(dict.fromkeys(self._heard, 9.0), frozenset(self._heard))

    patches.set(roster.NodeRoster, "_silences", silences)
