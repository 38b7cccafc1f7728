"""Mistakes put into the product on purpose, one at a time: the simulation must find each of them.

They are mistakes that this product or others have had, or that are easily made. A name that no longer exists
is an error. `tests/power.py` replays all of them; `python -m tests.simulation --mutation NAME` one. Those of
repairs in place are in repairs/mutations.py.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import msgspec

from moe_ft.cluster.signed_store import SignedStore
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.engine.breakpoints import Breakpoints
from moe_ft.engine.decisions import Decisions
from moe_ft.engine.memory.region_stores import ReplicaStore
from moe_ft.engine.persist import retention
from moe_ft.engine.persist.manifests import manifests
from moe_ft.engine.persist.retention import Retention
from moe_ft.engine.persist.storage_lock import SeenLock
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.files import local_files, storage
from moe_ft.files.storage import Storage
from moe_ft.loop.checkpoints import Checkpoints
from moe_ft.loop.leaving import BreakpointWriter
from moe_ft.loop.resumption import Replay, Resumption
from moe_ft.loop.routers import Routers
from moe_ft.planning import boundary_log
from moe_ft.planning import recovery as planning
from moe_ft.planning.branches import order_starts
from moe_ft.planning.recovery import Plan
from moe_ft.recovery import fetch as fetching
from moe_ft.recovery import readers, start
from moe_ft.recovery.claim import take_over_lock
from moe_ft.recovery.inspect import pruning
from moe_ft.recovery.restore import Conversion
from moe_ft.store.extents import Extent, Reason, SizeClass, Store
from moe_ft.strategies.rotating import RotatingExperts
from tests.simulation.active import Patches

Mutation = Callable[[Patches], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list, under the name of the function that makes it."""
    MUTATIONS[name_of(make)] = make
    return make


def name_of(make: Mutation) -> str:
    """Return the name of a mistake."""
    return make.__name__.replace("_", "-")


def of_group(group: set[str]) -> Callable[[Mutation], Mutation]:
    """Return what adds a mistake to the list, and its name to a group that needs jobs of its own."""

    def add(make: Mutation) -> Mutation:
        group.add(name_of(make))
        return mutation(make)

    return add


@mutation
def region_used_too_early(patches: Patches) -> None:
    """The next window goes into the region of the newest complete one."""
    _fill_first(patches, Reason.COMPLETE, SizeClass.WINDOW)


def _fill_first(patches: Patches, reason: Reason, size_class: SizeClass) -> None:
    """Have a store fill extents of a size class that one reason alone keeps before all others."""
    original = Store.free

    def free(self: Store, of: SizeClass) -> list[Extent]:
        others = [kept for each, kept in self._kept.items() if each is not reason]
        kept = self._kept.get(reason, frozenset()).difference(*others)
        wrong = [each for each in kept if each.size_class is of is size_class]
        return [*wrong, *(each for each in original(self, of) if each not in wrong)]

    patches.set(Store, "free", free)
    patches.set(Store, "take", _take_whatever)


def _take_whatever(self: Store, size_class: SizeClass, count: int = 1) -> list[Extent]:
    taken = self.free(size_class)[:count]
    self._filling |= frozenset(taken)
    for home in [home for home, names in self._names.items() if names.intersection(taken)]:
        self.drop(home)
    return taken


@mutation
def oldest_start_preferred(patches: Patches) -> None:
    """Recovery takes the state of the first start that has some."""
    patches.set(
        planning, "order_starts", lambda progress, known: order_starts(progress, known)[::-1]
    )


@mutation
def no_fsync(patches: Patches) -> None:
    """Files on storage are not brought to the disk."""
    patches.set(local_files, "os", _WithoutFsync())


class _WithoutFsync:
    """The module `os`, but for one function."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        """Do nothing."""


@mutation
def no_fsync_of_directories(patches: Patches) -> None:
    """The names of files on storage are not brought to the disk."""
    for module in (local_files, storage):
        patches.set(module, "sync_file", lambda path: None)


@mutation
def one_checkpoint_too_few(patches: Patches) -> None:
    """Retention deletes one checkpoint more than it may."""
    original = Retention.retain

    def retain(self: Retention, newest: Any) -> Any:
        self._keep -= 1
        try:
            return original(self, newest)
        finally:
            self._keep += 1

    patches.set(Retention, "retain", retain)


@mutation
def same_name_taken_at_once(patches: Patches) -> None:
    """A lock of a job of the same name is taken, whether or not that job runs."""
    name = "job"
    patches.set(SeenLock, "is_over", lambda self, own: self.lock and self.lock.job_id == name)


@mutation
def storage_that_is_away_refuses_a_start(patches: Patches) -> None:
    """A start that cannot write to storage is refused, although memory has what it needs."""
    patches.set(
        start, "take_over_lock", lambda *args, may_wait: take_over_lock(*args, may_wait=False)
    )


@mutation
def writes_not_read_back(patches: Patches) -> None:
    """Storage is trusted to have what was written."""
    patches.set(PersistWorker, "_read_back", lambda self, index, path: None)


@mutation
def pruned_without_reading(patches: Patches) -> None:
    """Pruning takes checkpoints whose data it has not read for right."""
    patches.set(pruning, "check_data", lambda *given, **more: None)


@mutation
def older_files_forgotten(patches: Patches) -> None:
    """Retention does not see that a checkpoint needs files of older ones."""

    def manifests_alone(found: Storage) -> Any:
        for iteration, path, manifest in manifests(found):
            if not isinstance(manifest, Exception):
                manifest = msgspec.structs.replace(manifest, older=())
            yield iteration, path, manifest

    patches.set(retention, "manifests", manifests_alone)


@mutation
def manifest_without_waiting(patches: Patches) -> None:
    """The manifest is written when rank 0 is done, of the ranks that are there by then."""
    original = PersistWorker._complete

    def complete(self: PersistWorker, index: Any, tag: str, *rest: Any) -> None:
        paths = (storage.rank_path(index.iteration, rank, tag, "json") for rank in range(99))
        there = list(takewhile(self._storage.exists, paths))
        identity = msgspec.structs.replace(index.identity, world_size=len(there))
        original(self, msgspec.structs.replace(index, identity=identity), tag, *rest)

    patches.set(PersistWorker, "_complete", complete)


@mutation
def own_vote_counts(patches: Patches) -> None:
    """A rank acts on its own vote, not on the least of all."""
    original = Decisions._read

    def read(self: Decisions) -> Any:
        own = self._votes
        _, tokens = original(self)
        return own, tokens

    patches.set(Decisions, "_read", read)


@mutation
def lost_tokens_not_made_up(patches: Patches) -> None:
    """Experts that are owed tokens keep their capacity."""
    patches.set(Routers, "make_up", lambda self, debts, *_: setattr(self, "_debts", debts))


@mutation
def debts_left_out_of_the_record(patches: Patches) -> None:
    """A snapshot does not say what experts are owed: a second failure forgets it."""
    original = RotatingExperts._progress

    def progress(self: RotatingExperts, *numbers: Any) -> Any:
        found = original(self, *numbers)
        return msgspec.structs.replace(found, owed={}, boost_left=0)

    patches.set(RotatingExperts, "_progress", progress)


@mutation
def breakpoint_owes_what_it_has_paid(patches: Patches) -> None:
    """A breakpoint keeps the debts from before the iteration that it is of."""
    original = RotatingExperts.plan_breakpoint

    def plan_breakpoint(self: RotatingExperts) -> Any:
        plan, debts = original(self), self.debts

        def unpaid(tokens: Any) -> Any:
            found = plan(tokens)

            def progress() -> Any:
                if not debts or not debts.num_left:
                    return found.progress()
                owed, left = self._ledger.by_layer(debts.tokens), debts.num_left
                return msgspec.structs.replace(found.progress(), owed=owed, boost_left=left)

            return dataclasses.replace(found, progress=progress)

        return unpaid

    patches.set(RotatingExperts, "plan_breakpoint", plan_breakpoint)


@mutation
def leader_speaks_for_its_group(patches: Patches) -> None:
    """A rank that leads a group takes its own vote to the next level, not the least of the group."""
    original = Agreement._reduce

    def reduce(self: Agreement, level: Any, values: Any) -> Any:
        is_below = len(self._levels) > 1 and level is self._levels[0]
        return original(self, level, values.clone() if is_below else values)

    patches.set(Agreement, "_reduce", reduce)


@mutation
def slots_used_too_early(patches: Patches) -> None:
    """Slots of the newest versions count as free."""
    _fill_first(patches, Reason.COMPLETE, SizeClass.UNIT)


@mutation
def one_replay_too_few(patches: Patches) -> None:
    """The last snapshot of a window is put back without its replay."""
    patches.set(
        Conversion,
        "num_replays",
        property(lambda self: max(0, len(self._agreed.slices) - 2)),
    )


@mutation
def replica_overwritten_too_early(patches: Patches) -> None:
    """The next replica goes where that of the newest complete window is."""
    _fill_first(patches, Reason.SENDER, SizeClass.WINDOW)


@mutation
def sender_not_heard(patches: Patches) -> None:
    """A holder of replicas does not heed which of them the sender says must stay."""
    original = ReplicaStore._keep
    patches.set(ReplicaStore, "_keep", lambda self, _, carried: original(self, None, carried))


@mutation
def persisted_region_is_free(patches: Patches) -> None:
    """A region that is being written to storage may be filled."""
    _fill_first(patches, Reason.PERSISTING, SizeClass.WINDOW)


@mutation
def checksums_ignored(patches: Patches) -> None:
    """Content that is read in a recovery is not compared with its checksum."""
    patches.set(readers, "check_unit", lambda *given: None)


@mutation
def log_of_another_iteration(patches: Patches) -> None:
    """A replay gets what was sent in the iteration before, where there is a log of it."""
    original = BoundaryPlayer.receive

    def receive(self: BoundaryPlayer, neighbour: int, *rest: Any) -> Any:
        iteration = self._iteration
        assert iteration is not None
        if self._logs[neighbour].get(iteration - 1) is not None:
            self._iteration = iteration - 1
        try:
            return original(self, neighbour, *rest)
        finally:
            self._iteration = iteration

    patches.set(BoundaryPlayer, "receive", receive)


@mutation
def torn_breakpoint(patches: Patches) -> None:
    """A breakpoint is written in the middle of an optimizer step, as if it were whole."""
    original = Breakpoints._hold

    def hold(self: Breakpoints, patience_s: float) -> Any:
        self._is_updating = False
        return original(self, patience_s)

    patches.set(Breakpoints, "_hold", hold)


@mutation
def breakpoint_overwritten_too_early(patches: Patches) -> None:
    """A breakpoint that the recovery rests on is not kept."""
    original = Breakpoints.start
    patches.set(Breakpoints, "start", lambda self, **_: original(self, is_in_use=False))


@mutation
def strangers_believed(patches: Patches) -> None:
    """A value in the job's store need not be signed."""
    patches.set(SignedStore, "_checked", lambda self, key, line: json.loads(line[65:] or "null"))


@mutation
def last_state_dropped(patches: Patches) -> None:
    """A rank that has trained to the end leaves no breakpoint, although another one has died."""
    patches.set(BreakpointWriter, "on_end", lambda self: None)


@mutation
def damaged_state_planned_with(patches: Patches) -> None:
    """State that cannot be read is not left out of a new plan."""
    patches.set(fetching, "place_of", lambda version: ("", "", 0, 0))


@mutation
def step_past_the_meeting(patches: Patches) -> None:
    """A rank that has said which iteration it steps to is not held there."""
    original = Breakpoints.write

    def write(self: Breakpoints, **given: Any) -> Any:
        written = original(self, **given)
        self._hold_at = None
        return written

    patches.set(Breakpoints, "write", write)


@mutation
def stage_left_behind(patches: Patches) -> None:
    """A stage that is one iteration behind continues with the others as it is."""
    original = Plan.scope_of

    def scope_of(self: Plan, stage: int) -> Any:
        return None if self.stages[stage].num_replays == 1 else original(self, stage)

    patches.set(Plan, "scope_of", scope_of)


@mutation
def numbers_of_another_iteration(patches: Patches) -> None:
    """A log keeps the numbers of the iteration before."""
    original = BoundaryLog.begin
    before: dict[BoundaryLog, Any] = {}

    def begin(self: BoundaryLog, iteration: int, numbers: Any = None) -> None:
        older = before.get(self)
        before[self] = numbers
        if numbers is not None and older is not None:
            facts = dataclasses.replace(older.facts, iteration=numbers.facts.iteration)
            numbers = dataclasses.replace(older, facts=facts)
        original(self, iteration, numbers)

    patches.set(BoundaryLog, "begin", begin)


@mutation
def too_few_logs(patches: Patches) -> None:
    """The log of an iteration is dropped two windows too early."""
    original = boundary_log.num_slots

    def num_slots(longest_window: int, interval: int) -> int:
        return max(1, original(longest_window, interval) - 2 * longest_window)

    patches.set(boundary_log, "num_slots", num_slots)


@mutation
def random_numbers_go_on(patches: Patches) -> None:
    """The random numbers of a recovered state are not restored before the loop continues."""
    patches.set(Resumption, "restore_rng", lambda self: None)


@mutation
def data_left_where_the_replay_began(patches: Patches) -> None:
    """The loop's counter of samples stays where the replay has begun to read."""
    original = Resumption._run

    def run(self: Resumption, *given: Any) -> int:
        first = self._replay.first_record if self._replay is not None else None
        try:
            return original(self, *given)
        finally:
            self._training.set_data_position(first.consumed_train_samples if first else 0)

    patches.set(Resumption, "_run", run)


@mutation
def end_of_the_replay_left_out(patches: Patches) -> None:
    """The iterations after a stage's own window are not run again."""
    patches.set(Replay, "_run_tail", lambda self, run_again, last: last.rng)


@mutation
def weights_changed_under_a_breakpoint(patches: Patches) -> None:
    """The optimizer steps while a breakpoint is written."""
    patches.set(Checkpoints, "begin_update", lambda self: None)
