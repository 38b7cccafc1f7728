"""Mistakes put into the product on purpose, one at a time: the simulation must find each of them.

They are mistakes that this product or others have had, or that are easily made. A name that no longer exists
is an error. `tests/power.py` replays all of them; `python -m tests.simulation --mutation NAME` one.
"""

import os
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import msgspec

from moe_ft.engine.decisions import Decisions
from moe_ft.engine.memory.pool import PoolVersions
from moe_ft.engine.memory.regions import Region, Role
from moe_ft.engine.persist import retention, storage
from moe_ft.engine.persist.retention import Retention
from moe_ft.engine.persist.storage import Storage
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.engine.snapshots.windows import Windows
from moe_ft.planning import recovery as planning
from moe_ft.recovery import readers, restore
from moe_ft.recovery.replay import Conversion
from tests.simulation.active import Patches

Mutation = Callable[[Patches], None]
MUTATIONS: dict[str, Mutation] = {}


def mutation(make: Mutation) -> Mutation:
    """Add a mistake to the list, under the name of the function that makes it."""
    MUTATIONS[make.__name__.replace("_", "-")] = make
    return make


@mutation
def region_used_too_early(patches: Patches) -> None:
    """The next window goes into the region of the newest complete one."""
    original = Windows._free_region

    def free(self: Windows) -> Region | None:
        if self.open is None and self.complete is not None and self.complete.role is Role.RECOVERY:
            return self.complete
        return original(self)

    patches.set(Windows, "_free_region", free)


@mutation
def oldest_start_preferred(patches: Patches) -> None:
    """Recovery takes the state of the first start that has some."""
    original = planning.order_starts
    patches.set(planning, "order_starts", lambda progress, known: original(progress, known)[::-1])


@mutation
def no_fsync(patches: Patches) -> None:
    """Files on storage are not brought to the disk."""
    patches.set(storage, "os", _WithoutFsync())


class _WithoutFsync:
    """The module `os`, but for one function."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        """Do nothing."""


@mutation
def no_fsync_of_directories(patches: Patches) -> None:
    """The names of files on storage are not brought to the disk."""
    patches.set(storage, "sync_file", lambda path: None)


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
def older_files_forgotten(patches: Patches) -> None:
    """Retention does not see that a checkpoint needs files of older ones."""
    original = retention.manifests

    def manifests(found: Storage) -> Any:
        for iteration, path, manifest in original(found):
            if not isinstance(manifest, Exception):
                manifest = msgspec.structs.replace(manifest, older=())
            yield iteration, path, manifest

    patches.set(retention, "manifests", manifests)


@mutation
def manifest_without_waiting(patches: Patches) -> None:
    """The manifest is written when rank 0 is done, of the ranks that are there by then."""
    original = PersistWorker._complete

    def complete(self: PersistWorker, index: Any, tag: str, *rest: Any) -> str:
        paths = (storage.rank_path(index.iteration, rank, tag, "json") for rank in range(99))
        there = list(takewhile(self._storage.exists, paths))
        identity = msgspec.structs.replace(index.identity, world_size=len(there))
        return original(self, msgspec.structs.replace(index, identity=identity), tag, *rest)

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
def slots_used_too_early(patches: Patches) -> None:
    """Slots of the newest versions count as free."""
    original = PoolVersions.find_free

    def find_free(self: PoolVersions, count: int) -> list[int]:
        kept, self._newest_slots = self._newest_slots, frozenset()
        try:
            return original(self, count)
        finally:
            self._newest_slots = kept

    patches.set(PoolVersions, "find_free", find_free)


@mutation
def record_of_the_iteration_before(patches: Patches) -> None:
    """The scalars that come back are those of the first snapshot of a window."""
    patches.set(restore.Restored, "record", property(lambda self: self.conversion.records[0]))


@mutation
def one_replay_too_few(patches: Patches) -> None:
    """The last snapshot of a window is put back without its replay."""
    patches.set(
        Conversion,
        "num_replays",
        property(lambda self: max(0, len(self._agreed.slices) - 2)),
    )


@mutation
def persisted_region_is_free(patches: Patches) -> None:
    """A region that is being written to storage may be filled."""
    original = Windows._free_region

    def free(self: Windows) -> Region | None:
        for region in self._memory.regions:
            if region.role is Role.PERSIST and region is not self.complete and self.open is None:
                region.role = Role.FREE
                return region
        return original(self)

    patches.set(Windows, "_free_region", free)


@mutation
def checksums_ignored(patches: Patches) -> None:
    """Content that is read in a recovery is not compared with its checksum."""
    patches.set(readers, "checksum", lambda content: _Anything())


class _Anything(str):
    """Equal to everything."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False
