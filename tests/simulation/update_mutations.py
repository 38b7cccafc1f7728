"""Mistakes in how a peer follows by gradients; mutations.py has all others.

The checksums of the owner turn most of them into state that is sent: the oracle does not let that happen to
a peer that has the iteration before, while nothing disturbs a start.
"""

from dataclasses import replace
from typing import Any

from moe_ft.engine.memory.region_stores import ReplicaStore
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.updates import adam
from moe_ft.engine.updates.adam import Repetition
from moe_ft.engine.updates.capture import GradientCapture
from moe_ft.engine.updates.following import LentUpdate
from moe_ft.format.index import Index
from tests.simulation.active import Patches
from tests.simulation.mutations import Mutation, mutation, name_of

OF_UPDATES: set[str] = set()


def _of_updates(make: Mutation) -> Mutation:
    """Add a mistake that only jobs show whose peers follow by gradients."""
    OF_UPDATES.add(name_of(make))
    return mutation(make)


@_of_updates
def step_repeated_twice(patches: Patches) -> None:
    """A peer steps twice with one gradient."""
    original = adam.repeat_step

    def repeat_step(before: Any, gradient: Any, after: Any, *rest: Any) -> None:
        sent = gradient.clone()
        original(before, gradient, after, *rest)
        original(tuple(each.clone() for each in after), sent, after, *rest)

    patches.set(adam, "repeat_step", repeat_step)


@_of_updates
def step_from_another_base(patches: Patches) -> None:
    """A peer steps from what lies in the region that it fills: the iteration before the last one."""
    original = Repetition.run

    def run(self: Repetition, source: memoryview, target: memoryview, receive: Any) -> None:
        original(self, target, target, receive)

    patches.set(Repetition, "run", run)


@_of_updates
def skipped_step_forgotten(patches: Patches) -> None:
    """An iteration whose step was skipped is sent with the gradients of the last step."""
    original = GradientCapture.lend

    def lend(self: GradientCapture, iteration: int) -> LentUpdate:
        tried, self._tried = self._tried, iteration
        try:
            lent = original(self, iteration)
        finally:
            self._tried = tried
        if lent.update is None:
            return lent
        update = type(lent.update)(iteration - 1, lent.update.steps, lent.update.slices)
        return replace(lent, update=update)

    patches.set(GradientCapture, "lend", lend)


@_of_updates
def base_freed_too_early(patches: Patches) -> None:
    """A peer gives up the base of a step before it has made what follows."""
    original = ReplicaStore.base

    def base(self: ReplicaStore, iteration: int, target: Region) -> tuple[Region, Index]:
        region, index = original(self, iteration, target)
        region.invalidate()
        return region, index

    patches.set(ReplicaStore, "base", base)
