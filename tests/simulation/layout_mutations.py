"""Mistakes in what a start does with the state of another layout; mutations.py has all others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from moe_ft.planning.recovery import Plan
from moe_ft.recovery import look, new_record, protect, relayout, restore, start
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
    original = planning.plan_recovery

    def plan_recovery(versions: Any, *rest: Any) -> Any:
        return original([replace(each, world_size=0) for each in versions], *rest)

    patches.set(planning, "plan_recovery", plan_recovery)


@_of_layouts
def everything_of_a_run_by_rank(patches: Patches) -> None:
    """Of what another layout has left, a rank sees what a rank of its number had."""
    original = planning.plan_recovery

    def own(found: Any) -> Any:
        return {
            rank: tuple(each for each in sources if each.version.rank == rank)
            for rank, sources in found.items()
        }

    def plan_recovery(*given: Any) -> Any:
        plans, rejected = original(*given)
        return [replace(each, elsewhere=own(each.elsewhere)) for each in plans], rejected

    patches.set(planning, "plan_recovery", plan_recovery)


@_of_layouts
def newest_part_of_an_expert_counts(patches: Patches) -> None:
    """An expert's newest version is taken, whether or not all of it is there."""
    patches.set(
        relayout,
        "choose_version",
        lambda parts, wholes, is_allowed: max(filter(is_allowed, parts), default=None),
    )


@_of_layouts
def ages_forgotten(patches: Patches) -> None:
    """Experts count as if they were of the state's own iteration."""
    original = relayout.fetch_relayout

    def fetch(plan: Any, *rest: Any) -> Any:
        fetched = original(plan, *rest)
        versions = {
            name: replace(each, iteration=plan.iteration)
            for name, each in fetched.rotation.versions.items()
        }
        return replace(fetched, rotation=replace(fetched.rotation, versions=versions))

    patches.set(start, "fetch_relayout", fetch)


@_of_layouts
def experts_begin_again(patches: Patches) -> None:
    """An expert that was never saved keeps the weights that this layout begins with."""
    original = start.fetch_relayout

    def fetch(*given: Any) -> Any:
        fetched = original(*given)
        missing = tuple(each for each in fetched.missing if "nothing of it was saved" not in each)
        return replace(fetched, missing=missing)

    patches.set(start, "fetch_relayout", fetch)


@_of_layouts
def checkpoint_refers_to_another_layout(patches: Patches) -> None:
    """The first checkpoint after a change builds on one of the layout before."""
    original = restore.find_persisted

    def find(plan: Any, *rest: Any) -> Any:
        with _as_if_of_this_layout():
            return original(plan, *rest)

    patches.set(restore, "find_persisted", find)


@contextmanager
def _as_if_of_this_layout() -> Iterator[None]:
    known = Plan.is_other_layout
    Plan.is_other_layout = property(lambda self: False)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Plan.is_other_layout = known  # type: ignore[method-assign]


@_of_layouts
def room_made_of_what_was_recovered(patches: Patches) -> None:
    """The memory of ranks that are gone is freed at once."""
    original = protect.make_room
    patches.set(protect, "make_room", lambda site, peers, needed: original(site, peers, []))


@_of_layouts
def pools_filled_again(patches: Patches) -> None:
    """Slots of another layout whose pools have the same geometry are filled as this layout's own."""
    patches.set(protect, "clear_of_pools", lambda met, claimed: (met, claimed))


@_of_layouts
def same_random_numbers_again(patches: Patches) -> None:
    """A rank draws the random numbers of the beginning again."""
    patches.set(new_record, "_SEEDS_APART", 0)


@_of_layouts
def buffers_by_their_number(patches: Patches) -> None:
    """A buffer is that of the layer that had its number in the layout before, on the first rank."""
    original = relayout.make_record

    def make(indexes: Any, met: Any, position: int) -> Any:
        record = original(indexes, met, position)
        first = indexes[min(indexes)].records[position].buffers
        buffers = {name: first.get(name, each) for name, each in record.buffers.items()}
        return msgspec.structs.replace(record, buffers=buffers)

    patches.set(relayout, "make_record", make)
