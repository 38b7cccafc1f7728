"""Which complete snapshot goes to storage when, with which units of the pool, and what came of it.

Asking the writer is engine/persist.py. All ranks act alike: on what they have agreed on, and in the same
iteration.
"""

from moe_ft.engine.persist import PersistClient
from moe_ft.engine.pool import PoolVersions
from moe_ft.engine.regions import Region, Role
from moe_ft.engine.storage import file_tag, rank_path
from moe_ft.formats import Identity
from moe_ft.planning.strategies import Strategy


class StorageSchedule:
    """Owned by the training thread.

    A newer complete snapshot takes the place of one that is due and waits for the writer, never of the one
    that is being written (MoC-System, section 5.2).

    Attributes:
        is_due: whether the newest complete snapshot is to be written as soon as all writers are idle.
        is_idle: whether this rank's writer is.
    """

    def __init__(
        self,
        interval: int,
        client: PersistClient,
        versions: PoolVersions,
        strategy: Strategy,
        identity: Identity,
        rank: int,
    ) -> None:
        """Make a schedule.

        Args:
            interval: complete snapshots between those that are written, 0 for never.
            client: asks the writer.
            versions: in the pool.
            strategy: chooses the units of the pool that are written.
            identity: of this incarnation.
            rank: this rank.
        """
        self._interval, self._client = interval, client
        self._versions, self._strategy = versions, strategy
        self._identity, self._rank = identity, rank
        self._num_complete = 0
        self._newest_index = ""  # of this rank in the newest complete checkpoint
        self._unconfirmed_index = ""  # of what is being written
        self._last_iteration: int | None = None
        self._ending_iteration: int | None = None
        self.is_due, self.is_idle = False, True

    def start(self, newest_index: str) -> None:
        """Begin; `newest_index` is this rank's on storage, relative to the persist directory, if any."""
        self._newest_index = newest_index
        if self._interval:
            self._client.start()

    @property
    def is_busy(self) -> bool:
        """Whether this rank's writer writes."""
        return self._client.region is not None

    @property
    def has_failed(self) -> bool:
        """Whether the last one could not be written on this rank."""
        return self._client.has_failed

    @property
    def seconds_per_snapshot(self) -> float:
        """What the last one took, which may go on while `interval` snapshots are taken."""
        return self._client.last_seconds / self._interval

    def note_complete(self) -> None:
        """All ranks have completed a snapshot."""
        self._num_complete += 1
        if self._interval and self._num_complete % self._interval == 0:
            self.is_due = True

    def submit(self, region: Region, *, is_last: bool = False) -> None:
        """Have the newest complete snapshot written. Called by all ranks when all writers are idle.

        Args:
            region: that holds it.
            is_last: whether training has ended: everything goes to storage.
        """
        assert region.iteration is not None
        self.is_due = self.is_idle = False
        self._last_iteration = region.iteration
        if is_last:
            self._ending_iteration = region.iteration
        region.advance(Role.PERSIST)
        names = {str(unit) for unit in self._strategy.plan_persist(is_last=is_last)}
        if self._client.has_lost_previous:  # there is nothing to build on: everything goes again
            self._newest_index = ""
            names = set(self._versions.newest)
        tag = file_tag(self._identity, is_last=is_last)
        previous = "" if self._strategy.saves_all else self._newest_index
        rotating = self._versions.keep_persisting(names)
        rotating_bytes = sum(self._versions.newest[name].num_bytes for name in rotating)
        self._client.submit(region, rotating, previous, tag, rotating_bytes)
        self._unconfirmed_index = rank_path(region.iteration, self._rank, tag, "json")

    def is_at_end(self, iteration: int) -> bool:
        """Return whether the last state of the training has been submitted as a whole."""
        has_all = self._strategy.saves_all and self._last_iteration == iteration
        return has_all or self._ending_iteration == iteration

    def confirm(self, *, are_idle: bool, can_persist: bool) -> None:
        """Note whether what all ranks wrote has become a checkpoint, when all of them are done.

        Args:
            are_idle: whether all writers are.
            can_persist: whether none has failed.
        """
        if self._unconfirmed_index and are_idle:
            if can_persist:
                self._newest_index = self._unconfirmed_index
                self._strategy.note_persisted()
            self._unconfirmed_index = ""

    def poll(self, complete: Region | None, *, can_go_on: bool) -> bool:
        """Take back the region that has been written, or that nobody will write any more.

        Args:
            complete: holds the newest complete snapshot.
            can_go_on: whether no rank has failed.

        Returns:
            Whether there was one.
        """
        region = self._client.poll()
        if region is None and not can_go_on:
            region = self._client.cancel()
        if region is None:
            return False
        self.is_idle = True
        self._versions.end_persisting()
        region.advance(Role.RECOVERY if region is complete else Role.FREE)
        if region is not complete and self._versions.is_in_use:
            region.invalidate()  # slots that it names may have been used again in the meantime
        return True
