"""One snapshot to take: what of which state goes where, and how far that is."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from moe_ft.engine.layout import FileLayout, LazyLayout, UnitPlace
from moe_ft.engine.regions import Region
from moe_ft.format.entries import UnitEntry
from moe_ft.state import record as records
from moe_ft.strategies.interface import SnapshotPlan


class SnapshotState(IntEnum):
    """How far the last snapshot is, ordered so that the least over all ranks is that of the job."""

    RUNNING = 0
    FAILED = 1
    COMPLETE = 2  # of a window all snapshots are committed, and sent to the peers that take them
    NONE = 3


@dataclass(kw_only=True, slots=True)
class SnapshotJob:
    """One snapshot to take.

    Attributes:
        window: layout of the region.
        position: of the snapshot in its window.
        slots: places in the pool of the units that only some snapshots hold.
        carried: versions of such units that this snapshot does not hold, by name.
        keep_iteration: the end of the newest complete window, which peers must not overwrite yet.
        ready: on a GPU, the event after which the state may be read.
        is_protected: whether all peers have it, once it is complete.
        is_sent_to_peers: not where they would have to keep several of one iteration, at the end of training.
        pooled: all versions in the pool that the snapshot's index names, once it is committed.
    """

    region: Region
    window: LazyLayout
    iteration: int
    record: records.CapturedRecord
    keep_iteration: int | None
    plan: SnapshotPlan
    position: int = 0
    slots: Sequence[UnitPlace] = ()
    carried: Mapping[str, UnitEntry] = field(default_factory=dict)
    is_sent_to_peers: bool = True
    pooled: dict[str, UnitEntry] = field(default_factory=dict)
    ready: Any = None
    copied: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False
    is_protected: bool = True
    state: SnapshotState = SnapshotState.RUNNING
    copy_s: float = 0.0
    commit_s: float = 0.0
    replicate_s: float = 0.0
    complete_s: float = 0.0

    @property
    def layout(self) -> FileLayout:
        """Of the region. The copy thread's, until the snapshot is complete."""
        return self.window.get()

    @property
    def num_bytes(self) -> int:
        """What is copied."""
        return sum(place.num_bytes for place in self.places)

    @property
    def places(self) -> tuple[UnitPlace, ...]:
        """Of all units that are copied."""
        return (*self.layout.snapshots[self.position], *self.slots)

    @property
    def stretch(self) -> tuple[int, int]:
        """The first and the last byte of the region, the last one not included, that this snapshot adds."""
        ends = self.layout.ends
        return (ends[self.position - 1] if self.position else 0), ends[self.position]
