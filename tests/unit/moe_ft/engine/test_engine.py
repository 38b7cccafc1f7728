"""The engine of one rank: its parts, its seams, windows, storage, and the end of training."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_ft.engine import build, engine
from moe_ft.engine.background import ThreadWorker
from moe_ft.engine.clock import Clock
from moe_ft.engine.ending import LastState
from moe_ft.engine.persist.requests import (
    PersistRequest,
    PersistResult,
    WriterSettings,
    announced_path,
    notice_path,
    request_path,
)
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.engine.snapshots.index import RecordLog
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.engine.snapshots.windows import FENCE_DEADLINE_S, Windows
from moe_ft.faults import Phase
from moe_ft.files.progress import excused_until_s
from moe_ft.store.extents import SizeClass
from tests.unit.moe_ft.engine.engine_job import RECORD_S, Job, MakeJob, Rank, Setup
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import Recorder


def take_a_while(rank: Rank, phase: Phase, iteration: int) -> None:
    rank.clock.now += 0.5 + rank.rank


# Snapshots that are due


def test_time_of_the_record_and_of_the_fence_is_the_stall(make_job: MakeJob) -> None:
    job = make_job(interval=2)
    (rank,) = job.ranks
    job.before_step()
    assert job.end_iteration(1) == [0.0]
    rank.workers["snapshot"].is_eager = False
    job.before_step()
    assert job.end_iteration(2) == [RECORD_S]
    job.before_step()  # in vain
    assert job.end_iteration(3) == [FENCE_DEADLINE_S]


def test_automatic_interval_begins_with_iterations_without_snapshots(make_job: MakeJob) -> None:
    job = make_job(interval=None)
    (rank,) = job.ranks
    rank.hook = partial(take_a_while, rank)
    job.run(range(1, 12))
    assert rank.events("snapshot")[0].iteration == 5
    assert rank.events("interval")


# The fence and snapshots that are late


def test_fence_excuses_the_thread_that_waits_at_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    (rank,) = job.ranks
    rank.workers["snapshot"].is_eager = False
    job.run([1])
    excused: list[bool] = []

    def wait(event: threading.Event, timeout_s: float) -> bool:
        end_s = excused_until_s(threading.get_ident())
        excused.append(end_s > time.monotonic() + FENCE_DEADLINE_S / 2)
        return False

    monkeypatch.setattr(rank.clock, "wait", wait)
    job.before_step()
    assert excused == [True]


# The end of training


def test_storage_that_never_answers_leaves_the_last_state_in_memory(make_job: MakeJob) -> None:
    job = make_job(persist_interval=5)
    (rank,) = job.ranks
    job.run(range(1, 4))
    rank.clock.serve = lambda: None
    ending = job.finish()
    assert (ending.outcome, ending.newest_in_memory) == (LastState.UNSAVED, 3)
    assert not ending.may_lose_memory(is_complete=True)
    reasons = [each.fields["reason"] for each in rank.reports if each.event == "degraded"]
    assert reasons[0] == "the writer did not finish in time"
    assert reasons[-1] == "the last state is not on storage"


def test_last_state_that_is_not_read_back_in_time_is_said_to_be_written_alone(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = PersistWorker._tell

    def tell_written(worker: PersistWorker, path_for: Any, result: PersistResult) -> None:
        if path_for is notice_path:
            tell(worker, path_for, result)

    monkeypatch.setattr(PersistWorker, "_tell", tell_written)
    job = make_job(persist_interval=5)
    (rank,) = job.ranks
    job.run(range(1, 4))
    ending = job.finish()
    assert ending.outcome is LastState.UNSAVED
    assert not ending.may_lose_memory(is_complete=True)
    assert rank.reasons()[-1][1] == (
        "the last state is written, and was not read back by all ranks in time"
    )
    assert complete_iterations(job.storage) == [3]


@pytest.mark.parametrize("has_windows", [False, True])
def test_window_that_is_due_is_announced_to_the_writer_before_the_vote_on_it(
    make_job: MakeJob, has_windows: bool
) -> None:
    job = make_job(persist_interval=2, has_windows=has_windows)
    (rank,) = job.ranks
    length = 3 if has_windows else 1
    folder = rank.node_dir / "persist"
    job.run(range(1, 2 * length))
    assert not announced_path(folder, 0).exists()  # the first window stays in memory
    job.run([2 * length])
    content = announced_path(folder, 0).read_bytes()
    assert msgspec.json.decode(content, type=PersistRequest).iteration == 2 * length
    assert not request_path(folder, 0).exists()
    job.run([2 * length + 1])
    assert request_path(folder, 0).exists()
    assert not announced_path(folder, 0).exists()  # nobody has begun with it: the request does


def test_end_of_training_tries_again_until_storage_answers(make_job: MakeJob) -> None:
    job = make_job(persist_interval=5)
    (rank,) = job.ranks
    job.run(range(1, 4))
    serve, in_the_way = rank.clock.serve, Path(job.storage.url)
    in_the_way.write_text("no directory")

    def serve_later() -> None:
        if rank.clock.now > 10.0:
            in_the_way.unlink(missing_ok=True)
            rank.clock.serve = serve
        serve()

    rank.clock.serve = serve_later
    ending = job.finish()
    assert ending.outcome is LastState.SAVED
    assert rank.clock.now > 10.0
    failed = [each for each in rank.reports if each.event == "degraded"]
    assert {each.fields["part"] for each in failed} == {"persist"}
    assert 2 <= len(failed) <= 5  # with pauses that grow
    assert complete_iterations(job.storage) == [3]


def test_engine_that_was_closed_leaves_its_memory_until_it_is_removed(make_job: MakeJob) -> None:
    job = make_job()
    job.run([1, 2])
    (rank,) = job.ranks
    rank.engine.close()
    assert rank.workers["snapshot"].is_closed
    assert any(region.index_path.exists() for region in rank.memory.regions)
    rank.engine.remove_memory()
    assert not rank.node_dir.exists()


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """Return a rank whose engine is built with workers without threads, but never started."""
    return Job(tmp_path, Setup(), is_started=False).ranks[0]


def test_engine_that_is_only_built_has_no_thread_and_no_file(tmp_path: Path) -> None:
    (rank,) = Job(tmp_path, Setup(), is_started=False).ranks
    before = set(threading.enumerate())
    rank.build()
    assert set(threading.enumerate()) <= before  # one of another test may have ended
    assert not rank.node_dir.exists()


def test_default_clock_and_workers_are_those_of_the_system(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks: list[object] = []
    monkeypatch.setattr(engine, "Stall", clocks.append)
    rank.build()
    assert [type(clock) for clock in clocks] == [Clock]
    defaults = build.build_engine.__kwdefaults__
    assert defaults is not None
    assert defaults["make_worker"] is ThreadWorker


def test_replicator_that_comes_in_takes_the_place_of_connections(tmp_path: Path) -> None:
    recorder = Recorder()
    job = Job(tmp_path, Setup(), replicator=recorder)
    job.run([1, 2])
    assert [each.index.iteration for each in recorder.replicas] == [1, 2]
    job.close()
    assert recorder.is_closed


def test_only_the_rank_with_settings_for_it_supervises_the_writer(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(build, "WriterSupervisor", lambda *args: made.append(args))
    rank.build()
    assert made == []
    writer = WriterSettings(url="storage", keep=2, parent=1, lock_owner="")
    rank.context = replace(rank.context, writer=writer)
    rank.build()
    ((directory, command, *_),) = made
    assert directory == rank.node_dir / "persist"
    assert command[-1] == str(directory)


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

    def num_free(self) -> int:
        """Return the number of regions that may be filled."""
        return len(self.windows.store._store.free(SizeClass.WINDOW))


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
    only.windows.settle(FAILED, is_protected=False)
    assert only.num_free() == 2
