"""Snapshots and their windows while they are taken: the request, the results, and what is under way."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from moe_ft.engine.memory.layout import FileLayout, LayOut, UnitPlace
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.snapshots.profile import SnapshotProfile
from moe_ft.format.entries import UnitEntry
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan


class SnapshotState(IntEnum):
    """Progress of the last snapshot, ordered so that the least over all ranks is that of the job."""

    RUNNING = 0
    FAILED = 1
    COMPLETE = 2  # all snapshots of a window are committed, and sent to the peers that take them
    NONE = 3


# Takes the region and the last iteration of a window that this rank has committed.
Announce = Callable[[Region, int], None]


def announce_to_nobody(region: Region, iteration: int) -> None:
    """Do nothing: the window goes nowhere, or has to wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRequest:
    """A snapshot to take.

    Attributes:
        slots: places in the pool for the units that only some snapshots hold.
        carried: versions of such units that this snapshot does not hold, by name.
        at_peers: versions of such units that peers have, by name; None if peers get whatever they lack.
        keep_iteration: the end of the newest complete window, which peers must not overwrite yet.
        is_sent_to_peers: False if peers would have to keep several of one iteration: at the end of training.
        announce: called by the copy worker when the snapshot, the last of its window, is committed.
    """

    region: Region
    window: LayOut
    iteration: int
    keep_iteration: int | None
    plan: SnapshotPlan
    position: int = 0
    slots: Sequence[UnitPlace] = ()
    carried: Mapping[str, UnitEntry] = field(default_factory=dict)
    at_peers: Mapping[str, UnitEntry] | None = None
    is_sent_to_peers: bool = True
    announce: Announce = announce_to_nobody

    @property
    def layout(self) -> FileLayout:
        """The layout of the region. Only the copy worker may ask before the snapshot is complete."""
        return self.window()

    @property
    def places(self) -> tuple[UnitPlace, ...]:
        """All that is copied."""
        return (*self.layout.snapshots[self.position], *self.slots)

    @property
    def num_bytes(self) -> int:
        """The bytes that are copied."""
        return sum(place.num_bytes for place in self.places)

    @property
    def stretch(self) -> tuple[int, int]:
        """The part of the region that this snapshot adds: its first byte, and the first one after it."""
        ends = self.layout.ends
        return (ends[self.position - 1] if self.position else 0), ends[self.position]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicationResult:
    """Outcome of sending a snapshot: whether all peers have it, and the most bytes that one of them got.

    Attributes:
        can_follow: whether peers can make replicas of gradients, as far as is known.
    """

    is_protected: bool
    seconds: float
    num_bytes: int = 0
    can_follow: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotResult:
    """A committed snapshot.

    Attributes:
        copy_s: until nothing read the training state any more.
        commit_s: until it was committed, the copy included.
        pooled: the newest version in the pool of each unit, as its index names them.
        at_peers: the versions of these units that peers have once it is sent; None if those are the same.
        replication: what sending it comes to; None if it is not sent.
        pass_on: sends its window to the other half of the peers, once all ranks have it; None for no halves.
    """

    copy_s: float
    commit_s: float
    pooled: Mapping[str, UnitEntry]
    at_peers: Mapping[str, UnitEntry] | None
    replication: Future[ReplicationResult] | None
    pass_on: Callable[[], Future[ReplicationResult]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotJob:
    """A snapshot that was begun, as the training thread sees it.

    Attributes:
        copied: set by the copy worker when nothing reads the training state any longer, because all is copied
            or the copy has failed.
        abandoned: set by the training thread when the optimizer steps during the copy, which may then hold a
            mixture of two iterations and is never committed.
        result: set by the copy worker when it has committed the snapshot, or has failed.
    """

    request: SnapshotRequest
    copied: threading.Event
    abandoned: threading.Event
    result: Future[SnapshotResult]

    @property
    def iteration(self) -> int:
        """The iteration of the state."""
        return self.request.iteration

    @property
    def state(self) -> SnapshotState:
        """Progress on this rank."""
        if not self.result.done():
            return SnapshotState.RUNNING
        if self.result.exception() is not None:
            return SnapshotState.FAILED
        is_sent = self._replication is None or self._replication.done()
        return SnapshotState.COMPLETE if is_sent else SnapshotState.RUNNING

    @property
    def _replication(self) -> Future[ReplicationResult] | None:
        if not self.result.done() or self.result.exception() is not None:
            return None
        return self.result.result().replication

    @property
    def has_failed(self) -> bool:
        """True if it has failed, or will when its copy ends."""
        return self.state is SnapshotState.FAILED or self.abandoned.is_set()

    @property
    def is_protected(self) -> bool:
        """False if some peer did not get it."""
        sent = self._replication
        return sent is None or not sent.done() or sent.result().is_protected

    @property
    def replicate_s(self) -> float:
        """The time to send it, 0 if it was not sent."""
        return self._replication.result().seconds if self._replication is not None else 0.0

    def measure(self, profile: SnapshotProfile) -> None:
        """Have a profile note what a snapshot took that is complete."""
        result, num_bytes = self.result.result(), self.request.num_bytes
        profile.note(num_bytes, result.copy_s, result.commit_s, self.replicate_s)
        if self._replication is not None:
            sent = self._replication.result()
            profile.note_sent(sent.num_bytes, self.replicate_s, can_follow=sent.can_follow)

    @property
    def complete_s(self) -> float:
        """The time until it was complete."""
        return self.result.result().commit_s + self.replicate_s


@dataclass(kw_only=True, slots=True)
class OpenWindow:
    """Snapshots of consecutive iterations, which count only together. Owned by the training thread.

    Attributes:
        is_last: whether it holds the state that training has ended with.
        is_given_up: no further one is taken, because one has failed or an iteration had none.
        is_cut_off: given up because training has ended, which is no failure.
        is_broken: one could not be begun on this rank.
    """

    plan: WindowPlan
    layout: LayOut
    region: Region
    is_last: bool = False
    jobs: list[SnapshotJob] = field(default_factory=list)
    is_given_up: bool = False
    is_cut_off: bool = False
    is_broken: bool = False

    def break_off(self) -> None:
        """Have the window fail: the next snapshot cannot be begun on this rank."""
        self.is_given_up = self.is_broken = True

    @property
    def is_growing(self) -> bool:
        """True if the next iteration needs a snapshot."""
        return not self.is_given_up and len(self.jobs) < len(self.plan.snapshots)

    @property
    def last(self) -> SnapshotJob | None:
        """The last job that was begun, None if the first one could not be."""
        return self.jobs[-1] if self.jobs else None

    @property
    def has_failed(self) -> bool:
        """True if a snapshot has, or will when its copy ends."""
        return self.is_broken or any(job.has_failed for job in self.jobs)

    @property
    def is_protected(self) -> bool:
        """True if all peers have all snapshots that are complete."""
        return all(job.is_protected for job in self.jobs)

    @property
    def state(self) -> SnapshotState:
        """Progress of all of them together."""
        if self.is_growing or any(job.state is SnapshotState.RUNNING for job in self.jobs):
            return SnapshotState.RUNNING
        if self.is_given_up or self.has_failed:
            return SnapshotState.FAILED
        return SnapshotState.COMPLETE

    def facts(self) -> dict[str, Any]:
        """Return what the event log says of the window, nothing if its strategy has nothing to say."""
        if not self.plan.facts:
            return {}
        sizes = [job.request.num_bytes for job in self.jobs]
        return {"length": len(self.jobs), "bytes": sizes, **self.plan.facts}
