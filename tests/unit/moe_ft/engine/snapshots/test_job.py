"""A snapshot under way: its state follows from what the workers have set, which never changes again."""

import threading
from concurrent.futures import Future
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from moe_ft.engine.memory.layout import LazyLayout
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.snapshots.job import (
    ReplicationResult,
    SnapshotJob,
    SnapshotRequest,
    SnapshotResult,
    SnapshotState,
)
from moe_ft.errors import SnapshotError
from moe_ft.strategies.interface import SnapshotPlan
from tests.unit.moe_ft.builders import make_window

SENT = Future[ReplicationResult]


def make_request(position: int = 0) -> SnapshotRequest:
    return SnapshotRequest(
        region=Region(Path("."), 0, 0),
        window=LazyLayout(lambda: make_window(length=3).layout),
        iteration=5 + position,
        keep_iteration=None,
        plan=SnapshotPlan(levels={}),
        position=position,
    )


def make_job() -> SnapshotJob:
    return SnapshotJob(
        request=make_request(),
        copied=threading.Event(),
        abandoned=threading.Event(),
        result=Future(),
    )


def commit(job: SnapshotJob, sent: SENT | None = None) -> None:
    job.result.set_result(SnapshotResult(copy_s=1.0, commit_s=2.0, pooled={}, replication=sent))


def test_snapshot_runs_until_it_is_committed() -> None:
    job = make_job()
    assert job.state is SnapshotState.RUNNING
    job.copied.set()
    assert job.state is SnapshotState.RUNNING
    commit(job)
    assert job.state is SnapshotState.COMPLETE
    assert (job.is_protected, job.replicate_s, job.complete_s) == (True, 0.0, 2.0)


def test_snapshot_that_is_sent_runs_until_peers_have_it() -> None:
    job, sent = make_job(), SENT()
    commit(job, sent)
    assert job.state is SnapshotState.RUNNING
    assert job.is_protected  # as far as is known
    sent.set_result(ReplicationResult(is_protected=True, seconds=0.5))
    assert job.state is SnapshotState.COMPLETE
    assert job.is_protected
    assert (job.replicate_s, job.complete_s) == (0.5, 2.5)


def test_snapshot_that_a_peer_did_not_get_is_complete_and_not_protected() -> None:
    job, sent = make_job(), SENT()
    commit(job, sent)
    sent.set_result(ReplicationResult(is_protected=False, seconds=0.5))
    assert job.state is SnapshotState.COMPLETE
    assert not job.is_protected


def test_snapshot_has_failed_with_an_exception() -> None:
    job = make_job()
    job.result.set_exception(SnapshotError("the copy breaks here"))
    assert job.state is SnapshotState.FAILED
    assert job.has_failed


def test_snapshot_that_was_abandoned_will_fail_and_still_runs() -> None:
    job = make_job()
    job.abandoned.set()
    assert job.has_failed
    assert job.state is SnapshotState.RUNNING


def test_request_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        make_request().iteration = 6  # type: ignore[misc]


def test_stretches_of_a_window_follow_each_other() -> None:
    stretches = [make_request(position).stretch for position in range(3)]
    assert stretches[0][0] == 0
    assert [start for start, _ in stretches[1:]] == [end for _, end in stretches[:-1]]


def test_request_has_the_bytes_of_the_places_that_its_snapshot_adds() -> None:
    request = make_request(1)
    places = make_window(length=3).layout.snapshots[1]
    assert request.places == places
    assert request.num_bytes == sum(place.num_bytes for place in places)
