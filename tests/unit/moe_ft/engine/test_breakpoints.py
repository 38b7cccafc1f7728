"""A breakpoint holds one state, whole, or there is none and a reason; training waits while it is written."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ft.engine.breakpoints import BreakpointResult, Breakpoints
from moe_ft.errors import SnapshotError
from moe_ft.format.index import Index, check_units
from tests.unit.moe_ft.engine.engine_job import Job, Rank, Setup, capture

DEADLINE_S = 120.0


class Trained:
    """A rank whose training thread is the test."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        assert rank.engine.breakpoints is not None
        self.breakpoints: Breakpoints = rank.engine.breakpoints

    def step(self, iteration: int) -> None:
        """Make the state of an iteration, as its optimizer step does."""
        self.breakpoints.begin_update()
        self.rank.state.step(iteration)
        self.breakpoints.end_update(self.rank.engine.moment(capture(iteration)))

    def index(self) -> Index:
        """Return the index of the breakpoint, all of whose bytes were checked."""
        region = self.rank.memory.breakpoint
        assert region is not None
        index = region.index(Index)
        content = memoryview(region.mapping)
        check_units(index, {"": content}, "the breakpoint")
        for name, entry in index.entries():
            assert self.rank.state.has_written(content, name, entry), name
        return index


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    job = Job(tmp_path, Setup(has_breakpoints=True))
    yield Trained(job.ranks[0])
    job.close()


def in_thread(act: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_breakpoint_is_the_live_state_with_its_record(trained: Trained) -> None:
    trained.step(3)
    written = trained.breakpoints.write()
    assert (written.iteration, written.problem) == (3, "")
    index = trained.index()
    assert (index.iteration, index.window, index.records[-1].iteration) == (3, 1, 3)
    assert {entry.iteration for entry in index.units.values()} == {3}
    assert written.num_bytes > 0


def test_writer_waits_for_the_end_of_a_step_and_writes_the_next_state(trained: Trained) -> None:
    trained.step(3)
    trained.breakpoints.begin_update()
    assert trained.breakpoints.write(waits=False).stepping_to == 4
    found: list[BreakpointResult] = []
    writer = in_thread(lambda: found.append(trained.breakpoints.write()))
    trained.rank.state.step(4)
    trained.breakpoints.end_update(trained.rank.engine.moment(capture(4)))
    writer.join(DEADLINE_S)
    assert [each.iteration for each in found] == [4]
    assert trained.index().iteration == 4


def test_rank_that_is_behind_steps_once_more_and_is_held_again(trained: Trained) -> None:
    trained.step(3)
    trained.breakpoints.write()
    last: list[int] = []

    def train() -> None:
        for iteration in (4, 5):
            trained.step(iteration)
            last.append(iteration)

    in_thread(train)
    assert trained.breakpoints.wait_for_iteration(4, DEADLINE_S)
    assert trained.breakpoints.write().iteration == 4
    assert trained.index().iteration == 4
    assert last in ([], [4])


def test_tokens_that_nobody_knows_leave_no_breakpoint(trained: Trained) -> None:
    def unknown() -> None:
        raise SnapshotError("not added up yet")

    trained.step(3)
    moment = trained.rank.engine.moment(capture(3))
    moment = replace(moment, tokens=unknown, plan=lambda tokens: tokens())  # type: ignore[arg-type,return-value]
    trained.breakpoints.note(moment)
    assert "not added up yet" in trained.breakpoints.write().problem
    region = trained.rank.memory.breakpoint
    assert region is not None and not region.index_path.exists()
