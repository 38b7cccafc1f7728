"""Replicas over real connections: they arrive bit for bit, and nothing that is wrong replaces one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.background import Report, Reports
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.messages import (
    Deadline,
    Reply,
    receive_header,
    send,
    send_all,
)
from moe_ft.engine.links.peers import PeerConnection, PeerReplicator
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.topology import RankInfo
from tests.ports import free_port
from tests.unit.moe_ft.builders import (
    fill_region,
)
from tests.unit.moe_ft.engine.links.conftest import PATIENCE_S
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


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.close()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def replicator(peer: Peer, reports: Reports) -> Iterator[PeerReplicator]:
    replicator = PeerReplicator([peer.info], TOKEN, reports, no_fault, Clock())
    yield replicator
    replicator.close()


def only(reports: Reports) -> Report:
    (report,) = reports.drain()
    return report


# Keeping replicas


def test_first_replica_of_a_fresh_start_arrives(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator, reports: Reports
) -> None:
    region, index = own_state(tmp_path, 5)
    replicator.replicate(replica_of(region, index, None))
    assert only(reports).event == "replicate"
    assert peer.committed() == {5: bytes(region.mapping)}


def test_replica_arrives_bit_for_bit(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator
) -> None:
    region, index = own_state(tmp_path, 5)
    replicator.replicate(replica_of(region, index, 4))
    assert peer.committed() == {5: bytes(region.mapping)}


def test_index_of_a_replica_names_the_file_beside_it_and_else_is_the_same(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator
) -> None:
    region, index = own_state(tmp_path, 5, number=2)  # neither of the two at the peer
    replicator.replicate(replica_of(region, index, 4))
    (path,) = peer.regions[0].directory.glob("region_*.json")
    found = decode(path.read_bytes(), Index, str(path))
    assert found.file == path.with_suffix(".safetensors").name
    assert msgspec.structs.replace(found, file=index.file) == index


def test_replica_that_arrived_is_reported_with_its_peers(
    tmp_path: Path, replicator: PeerReplicator, reports: Reports
) -> None:
    region, index = own_state(tmp_path, 5)
    replicator.replicate(replica_of(region, index, 4))
    report = only(reports)
    assert (report.event, report.iteration) == ("replicate", 5)
    assert (report.fields["peers"], report.fields["bytes"]) == ([HOLDER], index.file_bytes)


def test_replica_goes_to_those_peers_only_that_it_is_for(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator, reports: Reports
) -> None:
    replica = replica_of(*own_state(tmp_path, 5), None)
    assert replicator.replicate(replace(replica, peers=frozenset({HOLDER + 1})))
    assert not peer.committed() and not list(reports.drain())
    assert replicator.replicate(replace(replica, peers=frozenset({HOLDER})))
    assert set(peer.committed()) == {5}


def test_replica_of_the_complete_snapshot_is_never_overwritten(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator
) -> None:
    kept: bytes | None = None
    for iteration in range(1, 8):
        region, index = own_state(tmp_path, iteration, number=iteration % 2)
        replicator.replicate(replica_of(region, index, iteration - 1))
        assert peer.committed()[iteration] == bytes(region.mapping)
        assert kept is None or peer.committed()[iteration - 1] == kept
        kept = bytes(region.mapping)


def test_replica_of_the_complete_snapshot_survives_many_that_were_not_completed(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator
) -> None:
    region, index = own_state(tmp_path, 1)
    replicator.replicate(replica_of(region, index, 0))
    kept = bytes(region.mapping)
    for iteration in (2, 3, 4):
        region, index = own_state(tmp_path, iteration, number=1)
        replicator.replicate(replica_of(region, index, 1))
        assert peer.committed() == {1: kept, iteration: bytes(region.mapping)}


def restart(peer: Peer) -> None:
    """Open the replicas again as a new process does that was restored from iteration 5."""
    for region in peer.regions:
        region.close()
        region.open()
        region.iteration = 5 if region.index_path.exists() else None


def test_replica_that_a_start_was_restored_from_survives_the_first_new_one(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator
) -> None:
    # The rank's node was replaced: this replica is all that there is of its state.
    region, index = own_state(tmp_path, 5)
    replicator.replicate(replica_of(region, index, 4))
    restart(peer)
    restored = peer.committed()[5]
    region, index = own_state(tmp_path, 6, number=1)
    replicator.replicate(replica_of(region, index, 5))
    assert peer.committed() == {5: restored, 6: bytes(region.mapping)}


def spoil_data(region: Region, index: Index) -> Index:
    region.mapping[index.units["embedding"].offset] ^= 0x20
    return index


def spoil_header(region: Region, index: Index) -> Index:
    region.mapping[index.header_bytes - 1] ^= 0x20
    return index


def spoil_checksum(region: Region, index: Index) -> Index:
    unit = msgspec.structs.replace(index.units["embedding"], checksum="0" * 16)
    return msgspec.structs.replace(index, units={**index.units, "embedding": unit})


def escape_directory(region: Region, index: Index) -> Index:
    return msgspec.structs.replace(index, file="../region_0.safetensors")


WRONG = pytest.mark.parametrize(
    "spoil", [spoil_data, spoil_header, spoil_checksum, escape_directory]
)


@WRONG
def test_replica_that_is_corrupt_is_refused_and_the_one_before_intact(
    tmp_path: Path, peer: Peer, reports: Reports, replicator: PeerReplicator, spoil: object
) -> None:
    region, index = own_state(tmp_path, 5)
    replicator.replicate(replica_of(region, index, 4))
    before, reported = peer.committed(), reports.drain()
    assert reported[0].event == "replicate"
    region, index = own_state(tmp_path, 6, number=1)
    replicator.replicate(replica_of(region, spoil(region, index), 5))  # type: ignore[operator]
    assert only(reports).event == "degraded"
    assert peer.committed() == before


@WRONG
def test_replica_after_a_corrupt_one_is_taken_again(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator, spoil: object
) -> None:
    region, index = own_state(tmp_path, 5)
    replicator.replicate(replica_of(region, spoil(region, index), 4))  # type: ignore[operator]
    region, index = own_state(tmp_path, 6, number=1)
    replicator.replicate(replica_of(region, index, 4))
    assert peer.committed() == {6: bytes(region.mapping)}


def test_replica_with_a_wrong_token_is_refused_and_nothing_kept(
    tmp_path: Path, peer: Peer, reports: Reports
) -> None:
    region, index = own_state(tmp_path, 5)
    replicator = PeerReplicator([peer.info], "another token", reports, no_fault, Clock())
    replicator.replicate(replica_of(region, index, 4))
    replicator.close()
    assert only(reports).event == "degraded"
    assert peer.committed() == {}


def test_replica_of_a_rank_that_is_not_served_is_refused(tmp_path: Path, peer: Peer) -> None:
    region, index = fill_region(tmp_path / "own", rank=SOURCE + 1)
    with pytest.raises(OSError):  # noqa: B017, PT011 - whatever the network says
        peer.connect().put(replica_of(region, index, 4), (), no_fault)
    assert peer.committed() == {}


def test_replica_of_another_size_is_refused(tmp_path: Path, peer: Peer) -> None:
    region, index = fill_region(tmp_path / "own", rank=SOURCE, num_elements=99)
    with pytest.raises(OSError):  # noqa: B017, PT011
        peer.connect().put(replica_of(region, index, 4), (), no_fault)
    assert peer.committed() == {}


def test_replica_whose_sender_dies_in_the_middle_is_no_replica(
    tmp_path: Path, peer: Peer, reports: Reports
) -> None:
    def die(phase: Phase, iteration: int) -> None:
        if iteration == 6:
            raise RuntimeError("the sender dies here")

    replicator = PeerReplicator([peer.info], TOKEN, reports, die, Clock())
    region, index = own_state(tmp_path, 5)
    replicator.replicate(replica_of(region, index, 4))
    before = peer.committed()
    assert list(before) == [5]
    region, index = own_state(tmp_path, 6, number=1)
    replicator.replicate(replica_of(region, index, 5))
    # A new connection is served when the old one has been given up: both lock the same replicas.
    region, index = own_state(tmp_path, 7, number=1)
    peer.connect().put(replica_of(region, index, 5), (), no_fault)
    assert peer.committed() == {**before, 7: bytes(region.mapping)}


def test_replica_that_arrives_slowly_but_steadily_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than the buffers of a connection hold, over a link that takes longer than the time without
    # progress that is allowed, but is never silent for as long, and faster than the slowest rate.
    clock = LeapingClock(monkeypatch)
    monkeypatch.setattr("moe_ft.engine.links.messages.SLOWEST_BYTES_PER_S", 1e5)
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
    monkeypatch.setattr("moe_ft.engine.links.messages.PROGRESS_TIMEOUT_S", 0.3)
    monkeypatch.setattr("moe_ft.engine.links.messages.SLOWEST_BYTES_PER_S", 1e9)
    region, index = fill_region(tmp_path / "own", rank=SOURCE, num_elements=1_000_000)
    with (
        SlowReceiver(index.file_bytes) as receiver,
        closing(PeerConnection(receiver.address, TOKEN)) as connection,
        pytest.raises(TimeoutError),
    ):
        connection.put(replica_of(region, index, 4), (), no_fault)


# Peers that are gone


def test_peer_that_is_gone_is_tried_less_and_less_often(
    tmp_path: Path, peer: Peer, replicator: PeerReplicator, reports: Reports
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


def test_peer_that_comes_back_gets_the_next_replica(
    tmp_path: Path, peer: Peer, reports: Reports
) -> None:
    address = (HOST, free_port())
    gone = msgspec.convert({**info_fields(peer.info), "address": address}, RankInfo)
    replicator = PeerReplicator([gone], TOKEN, reports, no_fault, Clock())
    region, index = own_state(tmp_path, 5)
    assert not replicator.replicate(replica_of(region, index, 4))
    replicator._pairs[HOLDER].connection._address = peer.info.address
    assert replicator.replicate(replica_of(region, index, 4))
    replicator.close()
    assert [report.event for report in reports.drain()] == ["degraded", "replicate"]


def test_peer_that_does_not_say_a_word_is_given_up(
    tmp_path: Path, peer: Peer, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.engine.links.peers.PROGRESS_TIMEOUT_S", 0.2)
    region, index = own_state(tmp_path, 5)
    with socket.create_server((HOST, 0)) as listener:
        address = (HOST, listener.getsockname()[1])
        silent = msgspec.convert({**info_fields(peer.info), "address": address}, RankInfo)
        replicator = PeerReplicator([silent], TOKEN, reports, no_fault, Clock())
        replicator.replicate(replica_of(region, index, 4))
        replicator.close()
    reason = only(reports).fields["reason"]
    assert f"rank {HOLDER} did not take the replica: TimeoutError" in reason


def test_peer_that_lets_in_and_does_not_read_is_given_up_after_a_time_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.engine.links.messages.PROGRESS_TIMEOUT_S", 0.2)
    region, index = fill_region(tmp_path / "own", rank=SOURCE, num_elements=1_000_000)
    is_over = threading.Event()
    with (
        FakePeer(lambda _: bool(is_over.wait(DEADLINE_S))) as silent,
        closing(PeerConnection(silent.address, TOKEN)) as connection,
    ):
        with pytest.raises(TimeoutError):
            connection.put(replica_of(region, index, 4), (), no_fault)
        is_over.set()


def test_peer_that_takes_no_more_strangers_is_tried_until_it_does() -> None:
    def serve(connection: socket.socket) -> None:
        receive_header(connection, Deadline(DEADLINE_S))
        send(connection, Reply(num_bytes=2), Deadline(DEADLINE_S))
        send_all(connection, b"ok", Deadline(DEADLINE_S))

    with (
        FakePeer(serve, num_closed=2) as busy,
        closing(PeerConnection(busy.address, TOKEN)) as connection,
    ):
        assert connection.get("file") == b"ok"


def test_peer_that_sends_a_trickle_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.engine.links.messages.PROGRESS_TIMEOUT_S", 0.2)
    is_over = threading.Event()

    def trickle(connection: socket.socket) -> None:
        receive_header(connection, Deadline(DEADLINE_S))
        send(connection, Reply(num_bytes=1 << 20), Deadline(DEADLINE_S))
        while not is_over.wait(0.02):
            connection.send(b"x")

    with FakePeer(trickle) as slow, closing(PeerConnection(slow.address, TOKEN)) as connection:
        with pytest.raises(TimeoutError):
            connection.get("file")
        is_over.set()


def test_peer_that_is_left_still_gets_replicas(
    tmp_path: Path, peer: Peer, reports: Reports
) -> None:
    gone = msgspec.convert({**info_fields(peer.info), "rank": 1, "address": (HOST, 1)}, RankInfo)
    replicator = PeerReplicator([gone, peer.info], TOKEN, reports, no_fault, Clock())
    region, index = own_state(tmp_path, 5)
    replicator.replicate(replica_of(region, index, 4))
    replicator.close()
    degraded, replicated = reports.drain()
    assert "rank 1" in degraded.fields["reason"]
    assert replicated.fields["peers"] == [HOLDER]


def info_fields(info: RankInfo) -> dict[str, object]:
    return {name: getattr(info, name) for name in RankInfo.__dataclass_fields__}


def test_rank_without_peers_that_listen_reports_nothing(tmp_path: Path, reports: Reports) -> None:
    region, index = own_state(tmp_path, 5)
    PeerReplicator([], TOKEN, reports, no_fault, Clock()).replicate(replica_of(region, index, None))
    assert reports.drain() == []


def test_corrupt_replica_raises_what_the_peer_found(tmp_path: Path, peer: Peer) -> None:
    region, index = own_state(tmp_path, 5)
    spoil_data(region, index)
    with pytest.raises(CorruptStateError, match="rank 3: unit embedding does not match"):
        peer.connect().put(replica_of(region, index, 4), (), no_fault)
