"""Mistakes in what peers get: gradients, chosen experts, pieces of bodies; mutations.py has others.

The checksums of the owner turn most mistakes of gradients into state that is sent: the oracle does not let
that happen to a peer that has the iteration before, while nothing disturbs a start.
"""

import threading
from dataclasses import replace
from typing import Any

from moe_ft.engine.links import streams
from moe_ft.engine.links.streams import Streams
from moe_ft.engine.memory import parity
from moe_ft.engine.memory.layout import UnitPlace
from moe_ft.engine.memory.parity import ParityStore, ParityVersion
from moe_ft.engine.memory.region_stores import ReplicaStore, WindowStore
from moe_ft.engine.memory.regions import MappedFile, Region, UnitPool
from moe_ft.engine.snapshots import copying
from moe_ft.engine.updates import adam
from moe_ft.engine.updates.adam import Repetition
from moe_ft.engine.updates.capture import GradientCapture
from moe_ft.engine.updates.following import LentUpdate
from moe_ft.format.index import Index
from moe_ft.recovery import look, protect, rebuild
from moe_ft.store.extents import Extent, SizeClass
from moe_ft.strategies.selective.strategy import SelectiveStrategy
from tests.simulation.active import Patches
from tests.simulation.mutations import mutation, of_group

OF_UPDATES: set[str] = set()  # that only jobs show whose peers follow by gradients
OF_BUDGETS: set[str] = set()  # that only jobs with budgets of bytes show
OF_PARITY: set[str] = set()  # that only jobs show whose ranks keep parity


@of_group(OF_UPDATES)
def step_repeated_twice(patches: Patches) -> None:
    """A peer steps twice with one gradient."""
    original = adam.repeat_step

    def repeat_step(before: Any, gradient: Any, after: Any, *rest: Any) -> None:
        sent = gradient.clone()
        original(before, gradient, after, *rest)
        original(tuple(each.clone() for each in after), sent, after, *rest)

    patches.set(adam, "repeat_step", repeat_step)


@of_group(OF_UPDATES)
def step_from_another_base(patches: Patches) -> None:
    """A peer steps from what lies in the memory that it fills: the iteration before the last one."""
    original = Repetition.run

    def run(self: Repetition, source: Any, target: Any, receive: Any) -> None:
        original(self, target, target, receive)

    patches.set(Repetition, "run", run)


@of_group(OF_UPDATES)
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


@of_group(OF_UPDATES)
def base_freed_too_early(patches: Patches) -> None:
    """A peer gives up the base of a step before it has made what follows."""
    original = ReplicaStore.base

    def base(self: ReplicaStore, iteration: int, target: Region) -> tuple[Region, Index]:
        region, index = original(self, iteration, target)
        region.invalidate()
        return region, index

    patches.set(ReplicaStore, "base", base)


@of_group(OF_UPDATES)
def gaps_of_another_layout_left(patches: Patches) -> None:
    """Bytes that another layout has left between two tensors stay there, others in each region."""
    patches.set(copying, "_clear_gaps", lambda *given: None)


@mutation
def pieces_in_the_places_of_others(patches: Patches) -> None:
    """Of a body that several streams carry, two pieces go where the other one belongs."""
    original = streams._pieces

    def pieces(contents: Any) -> Any:
        found = list(original(contents))
        (first, one), (second, other), *rest = found
        if len(one) != len(other):
            return iter(found)
        return iter([(second, one), (first, other), *rest])

    patches.set(streams, "_pieces", pieces)


@mutation
def streams_not_waited_for(patches: Patches) -> None:
    """A body that several streams carry counts as over while they may still write."""

    def together(self: Streams, act: Any) -> None:
        threads = [threading.Thread(target=act, args=(each,)) for each in self._all]
        for each in threads:
            each.start()
        threads[0].join()

    patches.set(Streams, "_together", together)
    patches.set(streams._Arrivals, "check_are_full", lambda self: None)


@of_group(OF_BUDGETS)
def version_counted_at_peers_that_was_not_sent(patches: Patches) -> None:
    """Peers are thought to have whatever memory has, although they got what was chosen for them."""

    def note_sent(self: SelectiveStrategy, plan: Any) -> None:
        self._sent = self._saved

    patches.set(SelectiveStrategy, "note_sent", note_sent)


@of_group(OF_BUDGETS)
def one_counter_for_all_targets(patches: Patches) -> None:
    """A save in memory counts as one at the peers too, as in the paper, which has one counter."""
    original = SelectiveStrategy.note_complete

    def note_complete(self: SelectiveStrategy, plan: Any, iteration: int) -> None:
        original(self, plan, iteration)
        if self._sent is not None:
            self._sent = self._sent.replaced(plan.memo.selection, self._saved)

    patches.set(SelectiveStrategy, "note_complete", note_complete)


@of_group(OF_BUDGETS)
def versions_of_peers_overwritten(patches: Patches) -> None:
    """Slots with the versions that peers have count as free as soon as there are newer ones."""
    original = WindowStore._commit
    patches.set(WindowStore, "_commit", lambda self, region, retained: original(self, region, {}))


@of_group(OF_BUDGETS)
def followed_expert_made_in_place(patches: Patches) -> None:
    """A peer makes the next version of an expert where the one before lies."""
    original = adam._slots

    def slots(memory: Any, index: Index, names: Any) -> Any:
        found = original(memory, index, names)
        region = next((each for each in memory.regions if each.iteration is not None), None)
        if region is None or not region.iteration:
            return found
        return original(memory, region.index(Index), names)

    patches.set(adam, "_slots", slots)


@of_group(OF_BUDGETS)
def followed_expert_left_out_of_a_snapshot(patches: Patches) -> None:
    """Snapshots hold the experts that have their turn, also where peers follow others."""
    original = SelectiveStrategy._select_local

    def select_local(self: SelectiveStrategy, now: Any, follow: Any) -> Any:
        return original(self, now, type(follow)())

    patches.set(SelectiveStrategy, "_select_local", select_local)


@of_group(OF_BUDGETS)
def gaps_of_another_unit_left(patches: Patches) -> None:
    """Bytes that another unit has left in a slot stay between two tensors, others in each slot."""
    original = copying._clear_gaps

    def clear_gaps(file: MappedFile, place: UnitPlace) -> None:
        if not isinstance(file, UnitPool):
            original(file, place)

    patches.set(copying, "_clear_gaps", clear_gaps)


@mutation
def damaged_logs_forgotten(patches: Patches) -> None:
    """The logs of other nodes that have ended a replay, as they are damaged, are believed again."""
    patches.set(look, "failed_locally", lambda attempts: {})


@of_group(OF_PARITY)
def parity_used_too_early(patches: Patches) -> None:
    """The next window's parity goes where that of the newest complete one is."""
    original = ParityStore._begin

    def begin(self: ParityStore, window: Any, keep_iteration: int | None) -> ParityVersion:
        for number, each in enumerate(self._files):
            if None is not each.iteration == keep_iteration:
                self._store.drop(Extent(SizeClass.WINDOW, number))
        return original(self, window, None)

    patches.set(ParityStore, "_begin", begin)


@of_group(OF_PARITY)
def stripe_left_out_of_parity(patches: Patches) -> None:
    """One survivor's stripe stays in what is made again."""
    original = parity.end_of

    def end_of(index: Index) -> int:
        return 0 if index.rank == 1 else original(index)

    patches.set(rebuild, "end_of", end_of)


@of_group(OF_PARITY)
def broken_parity_counts(patches: Patches) -> None:
    """Parity to which a piece was added only in part counts as whole."""
    patches.set(ParityVersion, "is_broken", property(lambda self: False, lambda self, value: None))


@of_group(OF_PARITY)
def parity_without_what_was_recovered(patches: Patches) -> None:
    """A rank that was replaced gets nothing of the state that its group has recovered."""
    patches.set(protect, "_peers_without", lambda kept, peers: frozenset())
