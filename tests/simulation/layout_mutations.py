"""Mistakes in what a start does with the state of another layout; mutations.py has all others."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.planning.recovery import Plan, plan_recovery
from moe_ft.planning.shares import take_share
from moe_ft.recovery import divided, fetch, look, new_record, planner, protect, restore
from moe_ft.recovery import plan as planning
from moe_ft.recovery.divided import DividedUnits
from moe_ft.recovery.fetch import ORIGIN, Fetching
from moe_ft.recovery.overview import Overview
from moe_ft.units import parse_unit
from tests.simulation.active import Patches
from tests.simulation.mutations import of_group

OF_LAYOUTS: set[str] = set()
OF_AGES: set[str] = set()  # those of which experts with ages are needed


@of_group(OF_LAYOUTS)
def layout_not_marked(patches: Patches) -> None:
    """State of another layout is taken by the number of its rank."""
    patches.set(look, "mark_other_layouts", lambda *given: None)


@of_group(OF_LAYOUTS)
def complete_by_the_ranks_of_now(patches: Patches) -> None:
    """State of another layout counts as complete if as many ranks have some as there are now."""

    def plan(versions: Any, *rest: Any) -> Any:
        return plan_recovery([replace(each, world_size=0) for each in versions], *rest)

    patches.set(planning, "plan_recovery", plan)


@of_group(OF_AGES)
def everything_of_a_run_by_rank(patches: Patches) -> None:
    """Of what another layout has left, a rank sees what a rank of its number had."""

    def take(*given: Any, rank: int, **place: Any) -> Any:
        found, kept = take_share(*given, rank=rank, **place)
        own = tuple(each for each in found.elsewhere.get(rank, ()) if each.version.rank == rank)
        return replace(found, elsewhere={**found.elsewhere, rank: own}), kept

    patches.set(planner, "take_share", take)


@of_group(OF_AGES)
def newest_part_counts(patches: Patches) -> None:
    """The newest version of an expert is taken, whether or not all of it is there."""

    def versions(self: DividedUnits, unit: Any, level: Any, position: Any) -> Any:
        tensors = {each.block.tensor for each in self._needed(unit, level)}
        return sorted(self._parts_of(position, tensors), reverse=True)

    patches.set(DividedUnits, "versions", versions)


@of_group(OF_AGES)
def ages_forgotten(patches: Patches) -> None:
    """Experts of another layout count as if they were of the state's own iteration."""
    original = Fetching._with_rotation

    def with_rotation(self: Fetching, fetched: Any) -> Any:
        found, plan = original(self, fetched), self._plan
        if not plan.is_other_layout or found.index is None or found.index.progress is None:
            return found
        tokens = found.index.progress.routed_tokens

        def of_the_state(name: str, version: UnitVersion) -> UnitVersion:
            unit = parse_unit(name)
            routed = tokens[unit.layer_name][unit.expert]
            return replace(version, iteration=plan.iteration, routed_tokens=routed)

        versions = {
            name: of_the_state(name, each) for name, each in found.rotation.versions.items()
        }
        return replace(found, rotation=replace(found.rotation, versions=versions))

    patches.set(Fetching, "_with_rotation", with_rotation)


@of_group(OF_AGES)
def experts_begin_again(patches: Patches) -> None:
    """An expert that was never saved keeps the weights that this layout begins with."""
    original = Fetching._offers

    def offers(self: Fetching, unit: Any) -> Any:
        found = original(self, unit)
        return found or {ORIGIN: fetch._NOTHING} if self._plan.is_other_layout else found

    patches.set(Fetching, "_offers", offers)


@of_group(OF_AGES)
def checkpoint_refers_to_another_layout(patches: Patches) -> None:
    """The first checkpoint after a change builds on one of the layout before."""
    original = restore.find_persisted

    def find(plan: Plan, *rest: Any) -> Any:
        same = SimpleNamespace(
            is_other_layout=False, elsewhere=plan.elsewhere, iteration=plan.iteration
        )
        return original(cast(Plan, same), *rest)

    patches.set(restore, "find_persisted", find)


@of_group(OF_LAYOUTS)
def room_made_of_what_was_recovered(patches: Patches) -> None:
    """The memory of ranks that are gone is freed at once."""
    original = protect.make_room
    patches.set(protect, "make_room", lambda site, peers, needed: original(site, peers, []))


@of_group(OF_AGES)
def pools_filled_again(patches: Patches) -> None:
    """Slots of another layout whose pools have the same geometry are filled as this layout's own."""
    patches.set(protect, "clear_of_pools", lambda met, claimed: (met, claimed))


@of_group(OF_LAYOUTS)
def same_random_numbers_again(patches: Patches) -> None:
    """A rank draws the random numbers of the beginning again."""
    patches.set(new_record, "_SEEDS_APART", 0)


@of_group(OF_LAYOUTS)
def buffers_by_their_number(patches: Patches) -> None:
    """A buffer is that of the layer that had its number in the layout before, on the first rank."""
    original = new_record.make_record

    def make(indexes: Any, met: Any, position: int) -> Any:
        record = original(indexes, met, position)
        first = indexes[min(indexes)].records[position].buffers
        buffers = {name: first.get(name, each) for name, each in record.buffers.items()}
        return msgspec.structs.replace(record, buffers=buffers)

    patches.set(divided, "make_record", make)


@of_group(OF_LAYOUTS)
def one_index_of_those_with_the_same_tensors(patches: Patches) -> None:
    """A rank opens one index of those that have parts of the same tensors."""

    def places_of(self: Overview, tensors: Iterable[int]) -> set[int]:
        wanted = frozenset(tensors)
        return {places[0] for held, places in self.holders.items() if held & wanted}

    patches.set(Overview, "places_of", places_of)


@of_group(OF_LAYOUTS)
def lowest_rank_speaks_for_all(patches: Patches) -> None:
    """All ranks count as having had for themselves what the lowest one had."""
    original = Overview.indexes
    patches.set(Overview, "indexes", lambda self: dict(list(original(self).items())[:1]))
