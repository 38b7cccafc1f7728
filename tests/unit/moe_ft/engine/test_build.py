"""The parts of an engine come from one place, and start only when the engine does."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ft.engine import build, engine
from moe_ft.engine.clock import Clock
from moe_ft.engine.persist.writer import WriterSettings
from moe_ft.engine.worker import ThreadWorker
from tests.unit.moe_ft.engine.engine_job import Job, Rank, Setup
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import Recorder


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """Return a rank whose engine is built with workers without threads, but never started."""
    return Job(tmp_path, Setup(num_ranks=2), is_started=False).ranks[0]


def test_engine_that_is_only_built_has_no_thread_and_no_file(tmp_path: Path) -> None:
    (rank,) = Job(tmp_path, Setup(), is_started=False).ranks
    before = set(threading.enumerate())
    rank.build()
    assert set(threading.enumerate()) <= before  # one of another test may have ended
    assert not rank.node_dir.exists()


def test_default_clock_and_workers_are_those_of_the_system(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = []
    monkeypatch.setattr(engine, "Stall", clocks.append)
    rank.build()
    assert [type(clock) for clock in clocks] == [Clock]
    assert build.build_engine.__kwdefaults__["make_worker"] is ThreadWorker


def test_replicator_that_comes_in_takes_the_place_of_connections(tmp_path: Path) -> None:
    recorder = Recorder()
    job = Job(tmp_path, Setup(num_ranks=2), replicator=recorder)
    job.run([1, 2])
    assert [each.index.iteration for each in recorder.replicas] == [1, 1, 2, 2]
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
