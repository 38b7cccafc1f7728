"""The windows of one rank: which region is filled, which one stays, and which records are kept."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from moe_ft.engine.memory.regions import Role
from moe_ft.engine.snapshots.index import RecordLog
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.engine.snapshots.windows import Windows
from tests.unit.moe_ft.engine.engine_job import Job, Rank, Setup

FAILED, COMPLETE = SnapshotState.FAILED, SnapshotState.COMPLETE


class Only:
    """One rank, whose windows are begun and settled by hand."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.windows: Windows = rank.engine._windows
        self.records: RecordLog = self.windows._records

    def take(self, iterations: range) -> None:
        """Take all snapshots of a window."""
        for iteration in iterations:
            self.rank.state.step(iteration)
            capture = partial(self.rank.capture, iteration)
            if iteration == iterations.start:
                self.windows.begin(iteration, capture)
            else:
                self.windows.grow(iteration, capture, can_grow=True)

    def roles(self) -> list[Role]:
        """Return the role of each region."""
        return [region.role for region in self.rank.memory.regions]


@pytest.fixture
def only(tmp_path: Path) -> Iterator[Only]:
    job = Job(tmp_path, Setup(has_windows=True))
    yield Only(job.ranks[0])
    job.close()


def test_window_whose_iterations_have_a_gap_is_given_up(only: Only) -> None:
    only.take(range(1, 3))
    only.windows.grow(4, lambda: only.rank.capture(4), can_grow=True)
    assert only.windows.state is FAILED
    ((part, reason),) = only.rank.reasons()
    assert part == "snapshot"
    assert "iteration 4 does not follow 2" in reason


def test_record_that_cannot_be_taken_breaks_the_window_off(only: Only) -> None:
    only.windows.begin(1, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert only.windows.state is FAILED
    assert only.windows.last_job is None
    only.windows.settle(FAILED)
    assert only.roles() == [Role.FREE, Role.FREE]
