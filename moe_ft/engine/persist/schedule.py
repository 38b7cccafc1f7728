"""Decides when a complete snapshot is written to storage, with which units of the pool; tracks the result.

Asking the writer is engine/persist/client.py. All ranks do the same in the same iteration, on what they
agreed on.
"""

from dataclasses import dataclass
from functools import partial

from moe_ft.engine.memory.region_stores import WindowStore
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.client import PersistClient
from moe_ft.engine.snapshots.job import Announce, announce_to_nobody
from moe_ft.files.storage import file_tag, rank_path
from moe_ft.format.identity import Identity
from moe_ft.strategies.interface import PersistPlan, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """State that is being written, or that all ranks have read back; perhaps it has all units."""

    iteration: int
    has_all: bool
    index: str


class StorageSchedule:
    """The snapshots of one rank on their way to storage. Owned by the training thread.

    A newer complete snapshot replaces one that is due and waits for the writer, never the one that is being
    written (MoC-System, section 5.2).

    Attributes:
        is_due: whether the newest complete snapshot is to be written as soon as all writers are idle.
        is_idle: whether this rank's writer writes nothing.
    """

    def __init__(
        self,
        interval: int,
        client: PersistClient,
        store: WindowStore,
        strategy: Strategy,
        identity: Identity,
        rank: int,
        dense_interval: int = 0,
    ) -> None:
        """Take the parts that act.

        Args:
            interval: complete snapshots between those that are written, 0 for none before the end.
            dense_interval: iterations between whole states that are written, 0 for none.
        """
        self._interval = interval
        self._dense_interval = dense_interval
        self._client = client
        self._store = store
        self._strategy = strategy
        self._identity = identity
        self._rank = rank
        self._num_complete = 0
        self._num_since = 0  # complete snapshots since the last one that was submitted
        self._num_stood_for = 1  # likewise, when that one was
        self._whole_iteration = 0  # of the last whole state that was begun, or of this start
        self._newest_index = ""  # of this rank in the newest complete checkpoint
        self._planned = PersistPlan()  # for what is being written
        self._unconfirmed: _Written | None = None
        self._confirmed: _Written | None = None
        self._told: _Written | None = None  # the last one that the writer knows to be confirmed
        self._could_not_ask = False  # the writer to write the last one
        self.is_due = False
        self.is_idle = True

    def start(self, newest_index: str | None, iteration: int = 0) -> None:
        """Begin.

        Args:
            newest_index: this rank's on storage, relative to the persist directory; empty if there is none,
                None if that is not known: then everything is written again.
        """
        self._newest_index = newest_index or ""
        self._whole_iteration = iteration
        self._client.has_lost_previous = newest_index is None
        self._client.start()

    @property
    def has_failed(self) -> bool:
        """True if the last one could not be written on this rank."""
        return self._client.has_failed or self._could_not_ask

    @property
    def seconds_per_snapshot(self) -> float:
        """Time to write the last one, divided by the complete snapshots that it stands for."""
        return self._client.last_seconds / self._num_stood_for

    def needs_whole(self, iteration: int) -> bool:
        """Return whether the next window must hold everything at this iteration, for storage."""
        every = self._dense_interval
        return every > 0 and iteration // every > self._whole_iteration // every

    def note_whole(self, iteration: int) -> None:
        """All ranks have begun a window with everything at this iteration; if it fails, none follows."""
        self._whole_iteration = iteration

    def note_complete(self, iteration: int) -> None:
        """All ranks have completed a window."""
        self._num_complete += 1
        self._num_since += 1
        is_of_interval = self._interval > 0 and self._num_complete % self._interval == 0
        self.is_due |= is_of_interval or self._is_whole(iteration)

    def _is_whole(self, iteration: int) -> bool:
        return self._dense_interval > 0 and iteration == self._whole_iteration

    def wants(self, complete: Region, iteration: int) -> bool:
        """Return whether the newest complete window is to be written now, if all writers are idle.

        A whole state that is due or being taken comes first, as it would not wait for the writer.
        """
        newest = complete.iteration or 0
        if not self.is_due or self._is_whole(newest):
            return self.is_due
        return newest > self._whole_iteration and not self.needs_whole(iteration)

    def submit(self, region: Region, *, is_whole: bool = False) -> None:
        """Have the newest complete snapshot written, all of it at the end of training.

        Called by all ranks when all writers are idle.
        """
        assert region.iteration is not None
        is_whole |= self._is_whole(region.iteration)
        self._tell_confirmed()
        self._num_stood_for = max(1, self._num_since)
        self._num_since = 0
        self.is_due = self.is_idle = self._could_not_ask = False
        tag = file_tag(self._identity, is_whole=is_whole)
        self._unconfirmed = _Written(
            iteration=region.iteration,
            has_all=is_whole or self._strategy.rotation.is_empty,
            index=rank_path(region.iteration, self._rank, tag, "json"),
        )
        try:
            self._ask(region, tag, is_whole=is_whole)
        except Exception:
            # All ranks have to hear of it: to them, this rank's writer has failed.
            self._could_not_ask = self._client.iteration is None
            raise

    def _ask(self, region: Region, tag: str, *, is_whole: bool) -> None:
        self._planned = self._strategy.plan_persist(is_whole=is_whole)
        names = {str(unit) for unit in self._planned.units}
        if self._client.has_lost_previous:  # nothing to build on: everything is written again
            self._newest_index = ""
            names = set(self._store.newest)
        rotating = self._store.keep_persisting(region, names)
        is_alone = self._store.newest.keys() <= {*rotating}
        previous = "" if is_alone else self._newest_index
        rotating_bytes = sum(self._store.newest[name].num_bytes for name in rotating)
        self._client.submit(region, rotating, previous, tag, rotating_bytes)

    def _tell_confirmed(self) -> None:
        """Have older checkpoints deleted, if that is not done; not by a writer that is about to end."""
        if self._confirmed is not None and self._told is not self._confirmed:
            self._told = self._confirmed
            self._client.confirm(self._confirmed.index)

    def announcer(self, is_writable: bool, *, is_whole: bool) -> Announce:
        """Return what has the writer begin with the window under way as soon as this rank has it.

        That gains the time until all ranks know that they have it. Nothing begins if writers are busy, the
        window will not be due, or more goes to storage than its region.
        """
        self._tell_confirmed()
        is_due = self._interval > 0 and (self._num_complete + 1) % self._interval == 0
        if not (is_writable and self._strategy.rotation.is_empty and (is_due or is_whole)):
            return announce_to_nobody
        tag = file_tag(self._identity, is_whole=is_whole)
        return partial(self._client.announce, tag)

    def is_unread(self, iteration: int) -> bool:
        """Return whether this rank's part of the last state is on storage, and has only to be read back."""
        return self._client.written == iteration

    def is_at_end(self, iteration: int) -> bool:
        """Return whether the last state of the training is a complete checkpoint, with every unit."""
        confirmed = self._confirmed
        return confirmed is not None and confirmed.has_all and confirmed.iteration == iteration

    def confirm(self, *, are_idle: bool, can_persist: bool) -> bool | None:
        """Return whether all ranks have written and read back a checkpoint; None if some rank is not done."""
        if self._unconfirmed is None or not are_idle:
            return None
        if can_persist:
            self._confirmed = self._unconfirmed
            self._newest_index = self._unconfirmed.index
            self._strategy.note_persisted(self._planned)
        self._unconfirmed = None
        return can_persist

    def poll(self, *, can_go_on: bool) -> bool:
        """Keep the region no longer that was written, or will never be; return whether there was one."""
        is_over = not self.is_idle and (
            self._could_not_ask or self._client.poll(can_go_on=can_go_on)
        )
        if is_over:
            self.is_idle = True
            self._store.end_persisting()
        return is_over
