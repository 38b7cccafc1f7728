"""Mistakes in what a start does with the state of another layout; mutations.py has all others."""

from dataclasses import replace
from typing import Any

import msgspec

from moe_ft.planning.recovery import plan_recovery
from moe_ft.recovery import fetch, look, new_record
from moe_ft.recovery import plan as planning
from tests.simulation.active import Patches
from tests.simulation.mutations import Mutation, mutation, name_of

OF_LAYOUTS: set[str] = set()


def _of_layouts(make: Mutation) -> Mutation:
    """Add a mistake that only schedules with several layouts can find."""
    OF_LAYOUTS.add(name_of(make))
    return mutation(make)


@_of_layouts
def layout_not_marked(patches: Patches) -> None:
    """State of another layout is taken by the number of its rank."""
    patches.set(look, "mark_other_layouts", lambda *given: None)


@_of_layouts
def complete_by_the_ranks_of_now(patches: Patches) -> None:
    """State of another layout counts as complete if as many ranks have some as there are now."""

    def plan(versions: Any, *rest: Any) -> Any:
        return plan_recovery([replace(each, world_size=0) for each in versions], *rest)

    patches.set(planning, "plan_recovery", plan)


@_of_layouts
def same_random_numbers_again(patches: Patches) -> None:
    """A rank draws the random numbers of the beginning again."""
    patches.set(new_record, "_SEEDS_APART", 0)


@_of_layouts
def buffers_by_their_number(patches: Patches) -> None:
    """A buffer is that of the layer that had its number in the layout before, on the first rank."""
    original = new_record.make_record

    def make(indexes: Any, met: Any, position: int) -> Any:
        record = original(indexes, met, position)
        first = indexes[min(indexes)].records[position].buffers
        buffers = {name: first.get(name, each) for name, each in record.buffers.items()}
        return msgspec.structs.replace(record, buffers=buffers)

    patches.set(fetch, "make_record", make)
