"""Replicas over real connections, and those that send them: what arrives, and what is given up."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ft.engine.background import EngineEvent, EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.messages import PeerReply, receive_header, send
from moe_ft.engine.links.peers import OutgoingReplica, PeerConnection, PeerReplicator
from moe_ft.engine.links.transport import Deadline, TcpConnection
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.format.index import Index
from tests.unit.moe_ft.builders import (
    fill_region,
    make_window,
)
from tests.unit.moe_ft.engine.links.conftest import PATIENCE_S
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    COMPLETE,
    FIRST_ITERATION,
    LENGTH,
    Recorder,
    Trainer,
)
from tests.unit.moe_ft.peer import (
    DEADLINE_S,
    HOLDER,
    HOST,
    SOURCE,
    TOKEN,
    FakePeer,
    LeapingClock,
    Peer,
    SlowReceiver,
    no_fault,
    own_state,
    replica_of,
)
from tests.waiting import wait_for


@pytest.fixture
def reports() -> EventQueue:
    return EventQueue()


@pytest.fixture
def replicator(peer: Peer, reports: EventQueue) -> Iterator[PeerReplicator]:
    replicator = PeerReplicator([peer.info], TOKEN, reports, no_fault, Clock())
    yield replicator
    replicator.close()


def only(reports: EventQueue) -> EngineEvent:
    (report,) = reports.drain()
    return report


# Keeping replicas


def spoil_data(region: Region, index: Index) -> Index:
    region.mapping[index.units["embedding"].offset] ^= 0x20
    return index


def test_replica_with_a_wrong_token_is_refused_and_nothing_kept(
    tmp_path: Path, peer: Peer, reports: EventQueue
) -> None:
    region, index = own_state(tmp_path, 5)
    replicator = PeerReplicator([peer.info], "another token", reports, no_fault, Clock())
    replicator.replicate(replica_of(region, index, 4))
    replicator.close()
    assert only(reports).event == "degraded"
    assert peer.committed() == {}


@pytest.mark.parametrize("which", [{"rank": SOURCE + 1}, {"rank": SOURCE, "num_elements": 99}])
def test_replica_of_another_rank_or_size_is_refused(
    tmp_path: Path, peer: Peer, which: dict[str, int]
) -> None:
    region, index = fill_region(tmp_path / "own", **which)  # type: ignore[arg-type]
    with pytest.raises(OSError):  # noqa: B017, PT011 - whatever the network says
        peer.connect().put(replica_of(region, index, 4), (), no_fault)
    assert peer.committed() == {}


def test_replica_that_arrives_slowly_but_steadily_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than the buffers of a connection hold, over a link that takes longer than the time without
    # progress that is allowed, but is never silent for as long, and faster than the slowest rate.
    clock = LeapingClock(monkeypatch)
    monkeypatch.setattr("moe_ft.engine.links.transport.SLOWEST_BYTES_PER_S", 1e5)
    region, index = fill_region(tmp_path / "own", rank=SOURCE, num_elements=1_000_000)
    with (
        SlowReceiver(index.file_bytes, lambda: clock.leap(PATIENCE_S / 10)) as receiver,
        closing(PeerConnection(receiver.address, TOKEN)) as connection,
    ):
        connection.put(replica_of(region, index, 4), (), no_fault)


def test_peer_that_reads_a_trickle_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is never silent for long, and slower than the slowest rate.
    monkeypatch.setattr("moe_ft.engine.links.transport.PROGRESS_TIMEOUT_S", 0.3)
    monkeypatch.setattr("moe_ft.engine.links.transport.SLOWEST_BYTES_PER_S", 1e9)
    region, index = fill_region(tmp_path / "own", rank=SOURCE, num_elements=1_000_000)
    with (
        SlowReceiver(index.file_bytes) as receiver,
        closing(PeerConnection(receiver.address, TOKEN)) as connection,
        pytest.raises(TimeoutError),
    ):
        connection.put(replica_of(region, index, 4), (), no_fault)


# Peers that are gone


def test_peer_that_is_gone_is_tried_less_and_less_often(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator, reports: EventQueue
) -> None:
    peer.server.close()
    region, index = own_state(tmp_path, 5)
    answers = [replicator.replicate(replica_of(region, index, 4)) for _ in range(4)]
    assert answers == [False] * 4
    first, second, *rest = reports.drain()
    for report in (first, second):
        assert (report.event, report.fields["part"]) == ("degraded", "replicate")
        assert "rank 7 did not take the replica" in report.fields["reason"]
    assert [report.event for report in rest] == ["skipped", "skipped"]
    assert "rank 7 failed 2 times; tried again in" in rest[0].fields["reason"]


def test_peer_that_does_not_say_a_word_is_given_up(
    tmp_path: Path, peer: Peer, reports: EventQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.engine.links.peers.PROGRESS_TIMEOUT_S", 0.2)
    region, index = own_state(tmp_path, 5)
    with socket.create_server((HOST, 0)) as listener:
        address = (HOST, listener.getsockname()[1])
        silent = replace(peer.info, address=address)
        replicator = PeerReplicator([silent], TOKEN, reports, no_fault, Clock())
        replicator.replicate(replica_of(region, index, 4))
        replicator.close()
    reason = only(reports).fields["reason"]
    assert f"rank {HOLDER} did not take the replica: TimeoutError" in reason


def test_peer_that_lets_in_and_does_not_read_is_given_up_after_a_time_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.engine.links.transport.PROGRESS_TIMEOUT_S", 0.2)
    region, index = fill_region(tmp_path / "own", rank=SOURCE, num_elements=1_000_000)
    is_over = threading.Event()

    def wait(_: socket.socket) -> None:
        is_over.wait(DEADLINE_S)

    with (
        FakePeer(wait) as silent,
        closing(PeerConnection(silent.address, TOKEN)) as connection,
    ):
        with pytest.raises(TimeoutError):
            connection.put(replica_of(region, index, 4), (), no_fault)
        is_over.set()


def test_peer_that_takes_no_more_strangers_is_tried_until_it_does() -> None:
    def serve(connection: socket.socket) -> None:
        receive_header(TcpConnection(connection), Deadline(DEADLINE_S))
        send(TcpConnection(connection), PeerReply(num_bytes=2), Deadline(DEADLINE_S))
        TcpConnection(connection).send(b"ok", Deadline(DEADLINE_S))

    with (
        FakePeer(serve, num_closed=2) as busy,
        closing(PeerConnection(busy.address, TOKEN)) as connection,
    ):
        assert bytes(connection.get("file")) == b"ok"


def test_peer_that_sends_a_trickle_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.engine.links.transport.PROGRESS_TIMEOUT_S", 0.2)
    is_over = threading.Event()

    def trickle(connection: socket.socket) -> None:
        receive_header(TcpConnection(connection), Deadline(DEADLINE_S))
        send(TcpConnection(connection), PeerReply(num_bytes=1 << 20), Deadline(DEADLINE_S))
        while not is_over.wait(0.02):
            connection.send(b"x")

    with FakePeer(trickle) as slow, closing(PeerConnection(slow.address, TOKEN)) as connection:
        with pytest.raises(TimeoutError):
            connection.get("file")
        is_over.set()


def test_corrupt_replica_raises_what_the_peer_found(tmp_path: Path, peer: Peer) -> None:
    region, index = own_state(tmp_path, 5)
    spoil_data(region, index)
    with pytest.raises(CorruptStateError, match="rank 3: unit embedding does not match"):
        peer.connect().put(replica_of(region, index, 4), (), no_fault)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def sending(tmp_path: Path, recorder: Recorder) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path, recorder)
    yield trainer
    recorder.may_go_on.set()
    trainer.writer.close(DEADLINE_S)


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


def recovered(sending: Trainer) -> OutgoingReplica:
    """Return what peers are to get that a recovery has left."""
    window = make_window(first_iteration=FIRST_ITERATION - LENGTH)
    return OutgoingReplica(
        region=sending.regions[1],
        pool=None,
        index=window.index,
        start_byte=0,
        end_byte=window.layout.ends[-1],
        keep_iteration=None,
    )


@pytest.mark.parametrize("failure", [False, ValueError("a mistake of ours")], ids=str)
def test_what_was_recovered_is_tried_again_until_peers_have_it(
    failure: bool | Exception,
    sending: Trainer,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moe_ft.engine.links.sender._RECOVERED_RETRY_S", 0.01)
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
    monkeypatch.setattr("moe_ft.engine.links.sender._RECOVERED_RETRY_S", 0.01)
    recorder.answer = False
    sending.writer.send(recovered(sending))
    wait_for(lambda: len(recorder.replicas) > 1, "it to be tried again")
    for position in range(LENGTH):
        sending.take(position)
    assert [each.index.iteration for each in recorder.replicas][-LENGTH:] == [5, 6, 7]


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
