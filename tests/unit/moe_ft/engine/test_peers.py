"""Replicas over real connections: they arrive bit for bit, and nothing that is wrong replaces one."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec
import pytest

from moe_ft.engine.background import Report, Reports
from moe_ft.engine.clock import Clock
from moe_ft.engine.memory import ReplicaMemory
from moe_ft.engine.peer_authentication import challenge_client
from moe_ft.engine.peer_messages import (
    Deadline,
    Reply,
    receive,
    receive_header,
    send,
    send_all,
)
from moe_ft.engine.peers import PeerConnection, PeerReplicator
from moe_ft.engine.pool import Pool
from moe_ft.engine.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.recovery.readers import MemoryReader, read_unit
from moe_ft.topology import RankInfo
from tests.unit.moe_ft.builders import (
    add_units,
    fill_region,
    put_in_slot,
    replica_of,
    rotating_unit,
)
from tests.unit.moe_ft.peer import DEADLINE_S, HOLDER, HOST, SOURCE, TOKEN, Peer, no_fault


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


def own_state(tmp_path: Path, iteration: int, number: int = 0) -> tuple[Region, Index]:
    return fill_region(tmp_path / "own", number, rank=SOURCE, iteration=iteration)


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
    monkeypatch.setattr("moe_ft.engine.peer_messages.PROGRESS_TIMEOUT_S", 0.6)
    monkeypatch.setattr("moe_ft.engine.peer_messages.SLOWEST_BYTES_PER_S", 1e6)
    region, index = fill_region(tmp_path / "own", rank=SOURCE, num_elements=1_000_000)
    with (
        SlowReceiver(index.file_bytes) as receiver,
        closing(PeerConnection(receiver.address, TOKEN)) as connection,
    ):
        connection.put(replica_of(region, index, 4), (), no_fault)


def test_peer_that_reads_a_trickle_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is never silent for long, and slower than the slowest rate.
    monkeypatch.setattr("moe_ft.engine.peer_messages.PROGRESS_TIMEOUT_S", 0.3)
    monkeypatch.setattr("moe_ft.engine.peer_messages.SLOWEST_BYTES_PER_S", 1e9)
    region, index = fill_region(tmp_path / "own", rank=SOURCE, num_elements=1_000_000)
    with (
        SlowReceiver(index.file_bytes) as receiver,
        closing(PeerConnection(receiver.address, TOKEN)) as connection,
        pytest.raises(TimeoutError),
    ):
        connection.put(replica_of(region, index, 4), (), no_fault)


class FakePeer:
    """A peer that lets one connection in, after it closed some, and does with it what a test wants."""

    def __init__(self, act: Callable[[socket.socket], None], num_closed: int = 0) -> None:
        self._act, self._num_closed = act, num_closed
        self._listener = socket.create_server((HOST, 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.should_end = threading.Event()
        self.address: tuple[str, int] = (HOST, self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.should_end.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # the other side may give up, which it says itself
            for _ in range(self._num_closed):
                self._listener.accept()[0].close()
            with self._listener.accept()[0] as connection:
                challenge_client(connection, TOKEN, Deadline(DEADLINE_S))
                self._act(connection)


class SlowReceiver(FakePeer):
    """Takes a replica, the first part of it in small pieces at intervals, and says that all is well."""

    def __init__(self, data_bytes: int) -> None:
        super().__init__(self._take)
        self._data_bytes = data_bytes

    def _take(self, connection: socket.socket) -> None:
        deadline = Deadline(DEADLINE_S)
        header = msgspec.json.decode(receive_header(connection, deadline))
        receive(connection, header["index_bytes"], deadline)
        for _ in range(12):
            receive(connection, 1 << 20, deadline)
            self.should_end.wait(0.15)  # this is how slow the link is
        receive(connection, self._data_bytes - (12 << 20), deadline)
        send(connection, Reply(), deadline)


# Replicas with a pool

SLOT_ELEMENTS = 33


class Sender:
    """A rank with a pool, and a peer that keeps replicas of it."""

    def __init__(self, tmp_path: Path, reports: Reports) -> None:
        self.tmp_path = tmp_path
        self.peer = Peer(tmp_path)
        directory = self.peer.regions[0].directory
        self.pool, self.replica = self.make_pool(tmp_path / "own"), self.make_pool(directory)
        memory = ReplicaMemory(regions=tuple(self.peer.regions), pool=self.replica)
        self.peer.keep({SOURCE: memory})
        self.replicator = PeerReplicator([self.peer.info], TOKEN, reports, no_fault, Clock())
        self.connection = self.replicator._pairs[HOLDER].connection
        self.sent: list[tuple[str, ...]] = []

    def make_pool(self, directory: Path, num_slots: int = 6) -> Pool:
        """Return an open pool."""
        pool = Pool(directory, 4 * SLOT_ELEMENTS, num_slots)
        pool.open()
        return pool

    def send(
        self, iteration: int, slots: dict[int, tuple[int, int]], *, keep: int | None = None
    ) -> bool:
        """Send a snapshot whose index names these slots, each with an expert and an iteration."""
        region, index = own_state(self.tmp_path, iteration, number=iteration % 2)
        units = dict(
            put_in_slot(self.pool, slot, expert, iteration=at)
            for slot, (expert, at) in slots.items()
        )
        index = add_units(region, index, units)
        missing = self.replicator._pairs[HOLDER].missing(index)
        self.sent.append(tuple(sorted(missing)))
        return self.replicator.replicate(replica_of(region, index, keep, self.pool))

    def readable(self) -> dict[int, list[str]]:
        """Return by iteration the names of the pooled units that the replica has intact."""
        found: dict[int, list[str]] = {}
        for path in self.peer.regions[0].directory.glob("region_*.json"):
            reader = MemoryReader(path)
            pooled = sorted(name for name, unit in reader.index.units.items() if unit.file)
            for name in pooled:
                read_unit(reader, name)
            found[reader.index.iteration] = pooled
        return found

    def close(self) -> None:
        """Close all connections."""
        self.replicator.close()
        self.peer.close()


@pytest.fixture
def sender(tmp_path: Path, reports: Reports) -> Iterator[Sender]:
    sender = Sender(tmp_path, reports)
    yield sender
    sender.close()


EXPERTS = [str(rotating_unit(number)) for number in range(4)]


def test_replica_with_a_pool_has_every_version_that_its_index_names(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1), 1: (1, 1)})
    assert sender.readable() == {1: EXPERTS[:2]}


def test_versions_that_the_peer_has_already_are_not_sent_again(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1), 1: (1, 1)})
    assert sender.send(2, {0: (0, 1), 2: (1, 2)}, keep=1)
    assert sender.sent == [tuple(EXPERTS[:2]), (EXPERTS[1],)]
    assert sender.readable() == {1: EXPERTS[:2], 2: EXPERTS[:2]}


def test_all_versions_are_sent_again_after_a_failure(sender: Sender, reports: Reports) -> None:
    assert sender.send(1, {0: (0, 1), 1: (1, 1)})
    sender.replicator._phase_hook = _die
    assert not sender.send(2, {0: (0, 1), 2: (1, 2)}, keep=1)
    sender.replicator._phase_hook = no_fault
    assert sender.send(3, {0: (0, 1), 2: (1, 3)}, keep=1)
    assert sender.sent[2] == tuple(EXPERTS[:2])
    assert sender.readable()[3] == EXPERTS[:2]


def _die(phase: Phase, iteration: int) -> None:
    raise RuntimeError("the sender dies here")


def test_slot_of_a_snapshot_that_must_be_kept_is_not_overwritten(
    sender: Sender, reports: Reports
) -> None:
    assert sender.send(1, {0: (0, 1)})
    assert not sender.send(2, {0: (0, 2)}, keep=1)
    reason = reports.drain()[-1].fields["reason"]
    assert "a slot of iteration 1 would be overwritten, which must be kept" in reason
    assert sender.readable() == {1: EXPERTS[:1]}


def test_replica_after_one_that_was_refused_is_taken(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1)})
    assert not sender.send(2, {0: (0, 2)}, keep=1)
    assert sender.send(3, {1: (0, 3)}, keep=1)


def test_index_that_names_a_version_that_is_overwritten_is_removed(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1)})
    assert sender.send(2, {1: (0, 2)}, keep=1)
    assert sender.send(3, {0: (0, 3)}, keep=2)
    assert sender.readable() == {2: EXPERTS[:1], 3: EXPERTS[:1]}


def test_index_that_names_the_same_version_stays(sender: Sender) -> None:
    assert sender.send(1, {0: (0, 1), 1: (1, 1)})
    sender.replicator._pairs[HOLDER]._known = {}
    assert sender.send(2, {0: (0, 1), 1: (1, 1)}, keep=1)
    assert sender.readable() == {1: EXPERTS[:2], 2: EXPERTS[:2]}


def test_slot_of_a_pool_of_another_geometry_is_not_taken_for_one_that_must_be_kept(
    sender: Sender,
) -> None:
    # The start before had another k: what it left names slots of another file.
    directory = sender.peer.regions[0].directory
    old = sender.make_pool(directory, num_slots=5)
    region, index = fill_region(directory, 0, rank=SOURCE, iteration=1)
    add_units(region, index, dict([put_in_slot(old, 0, 0, iteration=1)]))
    sender.peer.regions[0].iteration = 1
    assert sender.send(2, {0: (0, 2)}, keep=1)


@pytest.mark.parametrize("wrong", [{"file": "pool_7x192.safetensors"}, {"offset": 64}])
def test_version_without_a_place_in_the_peers_pool_is_refused(
    tmp_path: Path, sender: Sender, wrong: dict[str, object]
) -> None:
    region, index = own_state(tmp_path, 5)
    name, unit = put_in_slot(sender.pool, 0, 0)
    index = add_units(region, index, {name: msgspec.structs.replace(unit, **wrong)})
    with pytest.raises(OSError, match="has no place in the pool|closed|reset|pipe"):
        sender.connection.put(replica_of(region, index, None, sender.pool), [name], no_fault)
    assert sender.readable() == {}


def test_version_that_is_corrupt_is_refused(sender: Sender, reports: Reports) -> None:
    region, index = own_state(sender.tmp_path, 5)
    name, unit = put_in_slot(sender.pool, 0, 0)
    index = add_units(region, index, {name: unit})
    sender.pool.mapping[unit.offset] ^= 0x20
    assert not sender.replicator.replicate(replica_of(region, index, None, sender.pool))
    assert f"unit {name} does not match its checksum" in reports.drain()[-1].fields["reason"]
    assert sender.readable() == {}


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
    unreachable = socket.create_server((HOST, 0))
    address = unreachable.getsockname()
    unreachable.close()
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
    monkeypatch.setattr("moe_ft.engine.peers.PROGRESS_TIMEOUT_S", 0.2)
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
    monkeypatch.setattr("moe_ft.engine.peer_messages.PROGRESS_TIMEOUT_S", 0.2)
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
    monkeypatch.setattr("moe_ft.engine.peer_messages.PROGRESS_TIMEOUT_S", 0.2)
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
