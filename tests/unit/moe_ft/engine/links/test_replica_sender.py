"""Sending snapshots to peers, on a worker of its own: in order, in parallel with the next copy."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ft.engine.links.peers import Replica
from tests.unit.moe_ft.builders import make_window
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    COMPLETE,
    DEADLINE_S,
    FIRST_ITERATION,
    LENGTH,
    RUNNING,
    Recorder,
    Trainer,
    fail_at,
)
from tests.waiting import wait_for


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def sending(tmp_path: Path, recorder: Recorder) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path, recorder)
    yield trainer
    recorder.may_go_on.set()
    trainer.writer.close(DEADLINE_S)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.writer.close(DEADLINE_S)


def test_peers_get_what_each_snapshot_adds_in_order(sending: Trainer, recorder: Recorder) -> None:
    for position in range(LENGTH):
        assert sending.take(position) is COMPLETE
    ends = sending.layout(LENGTH).ends
    found = [(each.start_byte, each.end_byte) for each in recorder.replicas]
    assert found == [(0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2])]
    assert [each.index.num_snapshots for each in recorder.replicas] == [1, 2, 3]
    assert [each.keep_iteration for each in recorder.replicas] == [FIRST_ITERATION - 1] * LENGTH


def test_snapshot_is_not_complete_before_peers_have_it(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.may_go_on.clear()
    job = sending.submit(sending.request(0))
    wait_for(lambda: recorder.replicas, "the replica to be under way")
    assert job.state is RUNNING
    assert sending.index().num_snapshots == 1
    recorder.may_go_on.set()
    wait_for(lambda: job.state is COMPLETE, "the snapshot to be complete")
    assert job.is_protected


def test_next_snapshot_is_committed_while_the_one_before_is_sent(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.may_go_on.clear()
    jobs = []
    for position in range(LENGTH):
        jobs.append(sending.submit(sending.request(position)))
        jobs[-1].result.result(DEADLINE_S)  # committed
    assert sending.index().is_whole
    assert [job.state for job in jobs] == [RUNNING] * LENGTH
    recorder.may_go_on.set()
    wait_for(lambda: all(job.state is COMPLETE for job in jobs), "all to be complete")
    assert [each.index.iteration for each in recorder.replicas] == [5, 6, 7]


def test_snapshot_that_peers_lack_is_complete_and_not_protected(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.answer = False
    job = sending.run(sending.request(0))
    assert job.state is COMPLETE
    assert not job.is_protected


def test_sender_that_fails_is_reported_and_the_next_snapshot_is_sent(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.answer = ValueError("a mistake of ours")
    job = sending.run(sending.request(0))
    assert job.state is COMPLETE
    assert not job.is_protected
    assert sending.reasons() == ["ValueError: a mistake of ours"]
    recorder.answer = True
    job = sending.run(sending.request(1))
    assert job.state is COMPLETE
    assert job.is_protected


def test_snapshot_that_is_not_for_peers_is_complete_without_them(
    sending: Trainer, recorder: Recorder
) -> None:
    assert sending.take(0, is_sent_to_peers=False) is COMPLETE
    assert recorder.replicas == []


def test_snapshot_that_failed_is_not_sent(sending: Trainer, recorder: Recorder) -> None:
    sending.hook = fail_at(FIRST_ITERATION + 1)
    for position in range(LENGTH):
        sending.take(position)
    assert [each.index.iteration for each in recorder.replicas] == [FIRST_ITERATION]


def test_time_of_sending_is_added_to_that_of_the_snapshot(
    sending: Trainer, recorder: Recorder
) -> None:
    job = sending.run(sending.request(0))
    assert job.replicate_s > 0
    assert job.complete_s == pytest.approx(job.result.result().commit_s + job.replicate_s)


def recovered(sending: Trainer) -> Replica:
    """Return what peers are to get that a recovery has left."""
    window = make_window(first_iteration=FIRST_ITERATION - LENGTH)
    return Replica(
        region=sending.regions[1],
        pool=None,
        index=window.index,
        start_byte=0,
        end_byte=window.layout.ends[-1],
        keep_iteration=None,
    )


def test_what_was_recovered_is_sent_before_the_snapshots_that_follow(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.may_go_on.clear()
    replica = recovered(sending)
    sending.writer.send(replica)
    job = sending.submit(sending.request(0))
    job.result.result(DEADLINE_S)  # committed
    wait_for(lambda: recorder.replicas, "the first to be sent")
    assert recorder.replicas == [replica]
    assert job.state is RUNNING
    recorder.may_go_on.set()
    wait_for(lambda: job.state is COMPLETE, "the snapshot to be complete")
    assert [each.index.iteration for each in recorder.replicas] == [4, FIRST_ITERATION]


@pytest.mark.parametrize("failure", [False, ValueError("a mistake of ours")], ids=str)
def test_what_was_recovered_is_tried_again_until_peers_have_it(
    failure: bool | Exception,
    sending: Trainer,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moe_ft.engine.links.peers._RETRY_S", 0.01)
    recorder.answer = failure
    replica = recovered(sending)
    sending.writer.send(replica)
    wait_for(lambda: len(recorder.replicas) > 2, "it to be tried again")
    recorder.answer = True
    wait_for(lambda: recorder.accepted, "peers to have it")
    number = recorder.replicas.count(replica)
    assert sending.take(0) is COMPLETE
    assert recorder.replicas.count(replica) == number  # never again after that
    assert recorder.replicas[-1].index.iteration == FIRST_ITERATION


def test_what_was_recovered_is_not_tried_again_after_something_newer(
    sending: Trainer, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.engine.links.peers._RETRY_S", 0.01)
    recorder.answer = False
    sending.writer.send(recovered(sending))
    wait_for(lambda: len(recorder.replicas) > 1, "it to be tried again")
    for position in range(LENGTH):
        sending.take(position)
    assert [each.index.iteration for each in recorder.replicas][-LENGTH:] == [5, 6, 7]


def test_writer_without_peers_sends_nothing(trainer: Trainer) -> None:
    trainer.writer.send(recovered(trainer))
    assert trainer.take(0) is COMPLETE


def test_writer_that_is_closed_sends_what_was_committed_before(
    tmp_path: Path, recorder: Recorder
) -> None:
    trainer = Trainer(tmp_path, recorder)
    jobs = []
    for position in range(LENGTH):
        jobs.append(trainer.submit(trainer.request(position)))
        assert jobs[-1].copied.wait(DEADLINE_S)
    trainer.writer.close(DEADLINE_S)
    assert [job.state for job in jobs] == [COMPLETE] * LENGTH
    assert recorder.is_closed
