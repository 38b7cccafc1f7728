"""Ranks that take real snapshots into real regions, for tests of what regions and indexes hold."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moe_ft.engine.background import EventQueue, ThreadWorker
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import OutgoingReplica, PeerReplicator
from moe_ft.engine.links.sender import ReplicaSender
from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.index import RecordLog, SnapshotIndexer
from moe_ft.engine.snapshots.job import SnapshotJob, SnapshotRequest, SnapshotState
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.engine.snapshots.writer import SnapshotWriter
from moe_ft.faults import Phase
from moe_ft.format.encoding import decode
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.state.parameters import LocalParameter
from tests.unit.moe_ft.builders import (
    WINDOW_UNITS,
    make_identity,
    make_record,
)
from tests.unit.moe_ft.small_rank import SmallRank, window_plan
from tests.waiting import wait_for

RUNNING, FAILED, COMPLETE = SnapshotState.RUNNING, SnapshotState.FAILED, SnapshotState.COMPLETE
FIRST_ITERATION, LENGTH, NUM_ELEMENTS = 5, 3, 9
EXPERTS, EMBEDDING = [str(unit) for unit in WINDOW_UNITS[:3]], str(WINDOW_UNITS[3])
SLACK_BYTES = 16384
DEADLINE_S = 120.0


class Recorder(PeerReplicator):
    """Takes replicas in the place of peers.

    Attributes:
        replicas: that were sent.
        accepted: those that peers have, as this has said.
        answer: whether peers have them, or the exception to raise.
        may_go_on: not set while replicas are to stay under way.
    """

    def __init__(self) -> None:
        self.replicas: list[OutgoingReplica] = []
        self.accepted: list[OutgoingReplica] = []
        self.answer: bool | Exception = True
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_closed = False
        self.most_bytes = 0
        self.can_follow = True

    def replicate(self, replica: OutgoingReplica) -> bool:
        """Take a replica."""
        self.replicas.append(replica)
        assert self.may_go_on.wait(DEADLINE_S)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer:
            self.accepted.append(replica)
            return True
        return False

    def close(self) -> None:
        """Note that nothing more will be sent."""
        self.is_closed = True


class SnapshotRank:
    """Regions of one rank, and the writer that fills them.

    Attributes:
        hook: called in the middle of each copy with the iteration.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        regions: list[Region],
        *,
        pool: UnitPool | None = None,
        recorder: Recorder | None = None,
        staging_bytes: int = 0,
    ) -> None:
        self.regions, self.reports = regions, EventQueue()
        self.hook: Callable[[int], None] = lambda iteration: None
        self.records = RecordLog(
            lambda captured: None, lambda captured: make_record(captured.facts.iteration)
        )
        for region in regions:
            region.open()
        sender = None
        if recorder is not None:
            sender = ReplicaSender(recorder, self.reports, ThreadWorker("replicate"), Clock())
        self.writer = SnapshotWriter(
            StateCopier(parameters, pool, staging_bytes),
            SnapshotIndexer(make_identity(), 0, "node-a", parameters, self.records, pool),
            self.records,
            pool,
            sender,
            self.reports,
            self._phase_hook,
            ThreadWorker("snapshot"),
            Clock(),
        )
        self.writer.start()

    def _phase_hook(self, phase: Phase, iteration: int) -> None:
        assert phase is Phase.SNAPSHOT
        self.hook(iteration)

    def submit(self, request: SnapshotRequest) -> SnapshotJob:
        """Begin a snapshot whose record has its iteration only."""
        captured: Any = SimpleNamespace(facts=SimpleNamespace(iteration=request.iteration))
        self.records.append(request.iteration, captured)
        return self.writer.submit(request)

    def run(self, request: SnapshotRequest) -> SnapshotJob:
        """Take a snapshot and wait for its end."""
        job = self.submit(request)
        wait_for(lambda: job.state is not RUNNING, f"the snapshot of iteration {job.iteration}")
        return job

    def index(self, region: int = 0) -> Index:
        """Return what a region holds."""
        path = self.regions[region].index_path
        return decode(path.read_bytes(), Index, str(path))

    def reasons(self) -> list[str]:
        """Return why something failed since the last call."""
        return [each.fields["reason"] for each in self.reports.drain() if each.event == "degraded"]


class Trainer(SnapshotRank):
    """A rank whose state says which iteration it is of, and the windows that hold it."""

    def __init__(self, directory: Path, recorder: Recorder | None = None) -> None:
        self.state = SmallRank(num_elements=NUM_ELEMENTS)
        self.catalog = self.state.catalog()
        self.layouts: dict[int, FileLayout] = {}
        size = self.layout(LENGTH).num_bytes + SLACK_BYTES
        regions = [Region(directory, number, size) for number in range(2)]
        super().__init__(self.state.parameters, regions, recorder=recorder)

    def layout(self, length: int) -> FileLayout:
        """Return the layout of a window."""
        if length not in self.layouts:
            self.layouts[length] = UnitLayouts(self.catalog, 0).lay_out(window_plan(length))
        return self.layouts[length]

    def request(
        self,
        position: int,
        *,
        first: int = FIRST_ITERATION,
        length: int = LENGTH,
        region: int = 0,
        **changes: Any,
    ) -> SnapshotRequest:
        """Return the request for a window's snapshot, whose state is there."""
        layout = self.layout(length)
        self.state.step(first + position)
        request = SnapshotRequest(
            region=self.regions[region],
            window=lambda: layout,
            position=position,
            iteration=first + position,
            keep_iteration=first - 1,
            plan=window_plan(length).snapshots[position],
        )
        return replace(request, **changes)

    def take(self, position: int, **which: Any) -> SnapshotState:
        """Take a window's snapshot and return how it ended."""
        return self.run(self.request(position, **which)).state

    def holds(self, entry: UnitEntry, name: str, region: int = 0) -> bool:
        """Return whether a unit version in a region is that of its iteration."""
        return self.state.has_written(memoryview(self.regions[region].mapping), name, entry)


def fail_at(iteration: int) -> Callable[[int], None]:
    """Return a hook that breaks the copy of an iteration."""

    def hook(at: int) -> None:
        if at == iteration:
            raise RuntimeError("the copy breaks here")

    return hook
