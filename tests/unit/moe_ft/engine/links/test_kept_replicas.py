"""Replicas at a peer: nothing replaces what must be kept, and nothing corrupt is taken."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.background import EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.messages import PeerReply, Put, receive_header, send
from moe_ft.engine.links.peers import OutgoingReplica, PeerReplicator
from moe_ft.engine.links.transport import Deadline, TcpConnection
from moe_ft.engine.memory.rank_memory import ReplicaMemory
from moe_ft.engine.memory.region_stores import ReplicaStore
from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.format.encoding import decode, encode
from moe_ft.format.identity import Family, Identity
from moe_ft.format.index import Index, check_units
from moe_ft.recovery.readers import MemoryReader, read_unit
from tests.unit.moe_ft.builders import (
    WINDOW_FILE_BYTES,
    WindowState,
    add_units,
    fill_region,
    fill_window,
    make_window,
    put_in_slot,
    rotating_unit,
)
from tests.unit.moe_ft.peer import (
    HOLDER,
    SOURCE,
    TOKEN,
    Peer,
    no_fault,
    own_state,
    replica_of,
    served_connections,
)
from tests.waiting import wait_for

DEADLINE_S, LENGTH = 120.0, 3


class Sender:
    """A rank that takes windows into two regions, and the peer that gets them."""

    def __init__(self, directory: Path) -> None:
        self.peer = Peer(directory, WINDOW_FILE_BYTES)
        self.reports = EventQueue()
        self.fails_at: set[int] = set()  # iterations at which sending breaks off in the middle
        self.replicator = PeerReplicator([self.peer.info], TOKEN, self.reports, self._hook, Clock())
        self.pair = self.replicator._pairs[HOLDER]
        self.regions = [Region(directory / "own", number, WINDOW_FILE_BYTES) for number in (0, 1)]
        for region in self.regions:
            region.open()

    def _hook(self, phase: Phase, iteration: int) -> None:
        assert phase is Phase.REPLICATE
        if iteration in self.fails_at:
            wait_for(served_connections, "the peer to serve the connection")
            raise RuntimeError("the sender breaks off here")

    def replica(
        self, window: WindowState, position: int, *, keep: int | None, region: int = 0
    ) -> OutgoingReplica:
        """Have a snapshot of a window committed, and return what peers are to get of it."""
        own = self.regions[region]
        start, end = window.stretch(position)
        own.mapping[start:end] = window.content[start:end]
        index = msgspec.structs.replace(window.up_to(position + 1), file=own.data_path.name)
        own.commit(encode(index), index.iteration)
        return OutgoingReplica(
            region=own,
            pool=None,
            index=index,
            start_byte=start,
            end_byte=end,
            keep_iteration=keep,
        )

    def send(
        self, window: WindowState, position: int, *, keep: int | None = None, region: int = 0
    ) -> bool:
        """Send a snapshot, whatever failed before; return whether the peer has it."""
        return self.send_replica(self.replica(window, position, keep=keep, region=region))

    def send_replica(self, replica: OutgoingReplica) -> bool:
        """Send what may be spoiled; return whether the peer has it."""
        self.pair.retry_s = 0.0
        has_arrived = self.replicator.replicate(replica)
        if self.pair.connection._connection is None:
            wait_for(lambda: not served_connections(), "the peer to give up the connection")
        return has_arrived

    def send_all(self, window: WindowState, *, keep: int | None = None, region: int = 0) -> None:
        """Send a whole window."""
        for position in range(window.index.window):
            assert self.send(window, position, keep=keep, region=region)

    def found(self) -> dict[int, int]:
        """Return by iteration how many snapshots the peer has, after checking every byte of them."""
        numbers = {}
        for path in self.peer.regions[0].directory.glob("region_*.json"):
            index = decode(path.read_bytes(), Index, str(path))
            content = (path.parent / index.file).read_bytes()
            check_units(index, {"": memoryview(content)}, str(path))
            numbers[index.iteration] = index.num_snapshots
        return numbers

    def close(self) -> None:
        """Close all connections."""
        self.replicator.close()
        self.peer.close()


def window_at(first: int, length: int = LENGTH, identity: Identity | None = None) -> WindowState:
    return make_window(SOURCE, first, length, identity)


OLD, NEW = window_at(2), window_at(5)  # which end at iterations 4 and 7


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    sender = Sender(tmp_path)
    yield sender
    sender.close()


# Replicas that must be kept


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_peer_never_loses_the_newest_complete_window_that_it_had_and_holds_nothing_corrupt(
    number: int,
) -> None:
    with TemporaryDirectory() as directory:
        sender = Sender(Path(directory))
        try:
            _train_with_failures(sender, random.Random(number))
        finally:
            sender.close()


def _train_with_failures(sender: Sender, seed: random.Random) -> None:
    """Send windows, some of whose snapshots break off or arrive corrupt, or which are given up."""
    first, region, keep, kept_content = 1, 0, None, None
    for _ in range(6):
        window = window_at(first, seed.randint(1, 4))
        num_taken = seed.choice([window.index.window] * 3 + [1])
        arrived = []
        for position in range(num_taken):
            iteration = first + position
            sender.fails_at = {iteration} if seed.random() < 0.2 else set()
            spoils = seed.random() < 0.1
            arrived.append(_send_perhaps_spoiled(sender, window, position, keep, region, spoils))
            found = sender.found()
            if kept_content is not None:
                assert keep is not None
                assert found[keep] == kept_content[0]
                assert sender.peer.committed()[keep] == kept_content[1]
            assert (iteration in found) == arrived[-1]
        first += num_taken
        if num_taken == window.index.window:  # all ranks have it in their own memory
            keep, region = window.index.iteration, 1 - region
            has_it = sender.found().get(keep) == window.index.window
            content = sender.peer.committed().get(keep, b"")
            kept_content = (window.index.window, content) if has_it else None
            assert has_it == arrived[-1]


def _send_perhaps_spoiled(
    sender: Sender,
    window: WindowState,
    position: int,
    keep: int | None,
    region: int,
    spoils: bool,
) -> bool:
    if not spoils or not window.layout.snapshots[position]:
        return sender.send(window, position, keep=keep, region=region)
    replica = sender.replica(window, position, keep=keep, region=region)
    place = window.layout.snapshots[position][0]
    replica.region.mapping[place.offset] ^= 0x10
    has_arrived = sender.send_replica(replica)
    replica.region.mapping[place.offset] ^= 0x10
    return has_arrived


def test_request_that_is_served_late_does_not_replace_what_came_after_it(sender: Sender) -> None:
    # Its sender has given it up, and has sent newer snapshots over another connection since.
    late, deadline = sender.replica(window_at(2, 1), 0, keep=None), Deadline(DEADLINE_S)
    content = encode(late.index)
    with closing(TcpConnection(sender.peer.connect_raw())) as connection:
        send(connection, Put(SOURCE, None, len(content), 0, late.end_byte), deadline)
        connection.send(content[:100], deadline)
        wait_for(served_connections, "the peer to serve the connection")
        sender.send_all(NEW)
        sender.send(window_at(8), 0, keep=7, region=1)
        connection.send(content[100:], deadline)
        connection.send(memoryview(late.region.mapping)[: late.end_byte], deadline)
        with suppress(OSError):
            receive_header(connection, deadline)  # whether it was taken or not, it was answered
    assert sender.found() == {7: LENGTH, 8: 1}


def test_replica_with_the_index_of_another_rank_is_refused_and_the_connection_continues(
    sender: Sender,
) -> None:
    replica, deadline = sender.replica(NEW, 0, keep=None), Deadline(DEADLINE_S)
    content = encode(msgspec.structs.replace(replica.index, rank=SOURCE + 1))
    own = encode(replica.index)
    data = memoryview(replica.region.mapping)[: replica.end_byte]
    errors = []
    with closing(TcpConnection(sender.peer.connect_raw())) as connection:
        for index in (content, own):
            send(connection, Put(SOURCE, None, len(index), 0, replica.end_byte), deadline)
            connection.send(index, deadline)
            connection.send(data, deadline)
            reply = receive_header(connection, deadline)
            errors.append(msgspec.json.decode(reply, type=PeerReply).error)
    assert errors == [f"an index of rank {SOURCE + 1} in a replica of rank {SOURCE}", ""]
    assert sender.found() == {5: 1}


@pytest.mark.parametrize("field", ["index_bytes", "start_byte", "data_bytes", "slot_bytes"])
def test_replica_of_a_negative_size_is_refused(sender: Sender, field: str) -> None:
    request = msgspec.structs.replace(Put(SOURCE, None, 0, 0, 0), **{field: -1})
    with closing(TcpConnection(sender.peer.connect_raw())) as connection:
        send(connection, request, Deadline(DEADLINE_S))
        reply = receive_header(connection, Deadline(DEADLINE_S))
    assert f"`$.{field}`" in msgspec.json.decode(reply, type=PeerReply).error


def test_replica_that_trickles_is_given_up(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.engine.links.transport.PROGRESS_TIMEOUT_S", 0.2)
    replica, deadline = sender.replica(NEW, 0, keep=None), Deadline(DEADLINE_S)
    content = encode(replica.index)
    with sender.peer.connect_raw() as connection:
        request = Put(SOURCE, None, len(content), 0, replica.end_byte)
        with suppress(ConnectionError):  # it has given up already, if this machine is busy
            send(TcpConnection(connection), request, deadline)
            TcpConnection(connection).send(content, deadline)
        connection.settimeout(0.05)  # this is how slow the sender is
        end_s, reply = time.monotonic() + DEADLINE_S, b""
        while not reply:
            assert time.monotonic() < end_s, "the peer receives a byte every 0.05 s and is patient"
            with suppress(ConnectionError):  # the answer is there
                connection.send(b"x")
            with suppress(TimeoutError):
                reply = connection.recv(1 << 10)
    assert b"not done within 0.2 s" in reply or b"timed out" in reply
    assert sender.found() == {}


def test_of_two_replicas_of_the_iteration_to_keep_the_better_one_stays(tmp_path: Path) -> None:
    regions = []
    for number, length in ((0, 3), (1, 2)):
        region, window = fill_window(tmp_path, number, first_iteration=8 - length, length=length)
        region.iteration = 7
        regions.append(region)
    preferred = max(regions, key=family_of_region)
    filled, _ = ReplicaStore(regions, None).begin(window.index, [], 7, continues=False)
    assert filled is not preferred
    assert preferred.index_path.exists()
    assert not filled.index_path.exists()


def family_of_region(region: Region) -> Family:
    index = region.index(Index)
    return index.identity.family(index.iteration, index.window)


# Stretches that are corrupt


@pytest.fixture
def reports() -> EventQueue:
    return EventQueue()


SLOT_ELEMENTS = 33


class PoolSender:
    """A rank with a pool, and a peer that keeps replicas of it."""

    def __init__(self, tmp_path: Path, reports: EventQueue) -> None:
        self.tmp_path = tmp_path
        self.peer = Peer(tmp_path)
        directory = self.peer.regions[0].directory
        self.pool, self.replica = self.make_pool(tmp_path / "own"), self.make_pool(directory)
        self.keep()
        self.replicator = PeerReplicator([self.peer.info], TOKEN, reports, no_fault, Clock())
        self.connection = self.replicator._pairs[HOLDER].connection
        self.sent: list[tuple[str, ...]] = []
        put = self.connection.put

        def record(replica: OutgoingReplica, slots: Sequence[str], *rest: Any) -> PeerReply:
            self.sent.append(tuple(sorted(slots)))
            return put(replica, slots, *rest)

        self.connection.put = record  # type: ignore[method-assign, assignment]

    def keep(self) -> None:
        """Have the peer keep replicas in its memory, whatever that holds."""
        memory = ReplicaMemory(regions=tuple(self.peer.regions), pool=self.replica)
        self.peer.keep({SOURCE: memory})

    def make_pool(self, directory: Path, num_slots: int = 6) -> UnitPool:
        """Return an open pool."""
        pool = UnitPool(directory, 4 * SLOT_ELEMENTS, num_slots)
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
def pooled(tmp_path: Path, reports: EventQueue) -> Iterator[PoolSender]:
    pooled = PoolSender(tmp_path, reports)
    yield pooled
    pooled.close()


EXPERTS = [str(rotating_unit(number)) for number in range(4)]


def test_versions_that_the_peer_has_already_are_not_sent_again(pooled: PoolSender) -> None:
    assert pooled.send(1, {0: (0, 1), 1: (1, 1)})
    assert pooled.send(2, {0: (0, 1), 2: (1, 2)}, keep=1)
    assert pooled.sent == [tuple(EXPERTS[:2]), (EXPERTS[1],)]
    assert pooled.readable() == {1: EXPERTS[:2], 2: EXPERTS[:2]}


def test_versions_that_are_carried_over_stay_and_the_index_goes_that_names_what_is_overwritten(
    pooled: PoolSender,
) -> None:
    versions = {slot: (slot, 1) for slot in range(6)}  # all slots
    assert pooled.send(1, versions)
    assert pooled.send(2, versions | {5: (5, 2)})
    assert pooled.sent[-1] == (str(rotating_unit(5)),)
    assert pooled.readable() == {2: sorted(str(rotating_unit(number)) for number in range(6))}


def test_replica_without_room_besides_what_must_be_kept_is_refused(
    pooled: PoolSender, reports: EventQueue
) -> None:
    assert pooled.send(1, {slot: (slot, 1) for slot in range(4)})
    assert not pooled.send(2, {slot: (slot, 2) for slot in range(4)}, keep=1)
    assert "4 extents of the class unit are needed, 2 of 6" in reports.drain()[-1].fields["reason"]
    assert pooled.readable() == {1: EXPERTS}


def test_slot_of_a_pool_of_another_geometry_is_not_taken_for_one_that_must_be_kept(
    pooled: PoolSender,
) -> None:
    # The start before had another k: what it left names slots of another file.
    directory = pooled.peer.regions[0].directory
    old = pooled.make_pool(directory, num_slots=5)
    region, index = fill_region(directory, 0, rank=SOURCE, iteration=1)
    add_units(region, index, dict([put_in_slot(old, 0, 0, iteration=1)]))
    pooled.peer.regions[0].iteration = 1
    pooled.keep()
    assert pooled.send(2, {0: (0, 2)}, keep=1)


@pytest.mark.parametrize("is_sent", [True, False])
def test_version_that_does_not_fit_a_slot_or_is_not_there_is_refused(
    is_sent: bool, tmp_path: Path, pooled: PoolSender
) -> None:
    region, index = own_state(tmp_path, 5)
    name, unit = put_in_slot(pooled.pool, 0, 0)
    more = pooled.pool.slot_bytes if is_sent else 0
    unit = msgspec.structs.replace(unit, num_bytes=unit.num_bytes + more)
    replica = replica_of(region, add_units(region, index, {name: unit}), None, pooled.pool)
    with pytest.raises(CorruptStateError, match=f"unit {name} has no place in the pool"):
        pooled.connection.put(replica, [name] * is_sent, no_fault)
    assert pooled.readable() == {}


def test_version_that_is_kept_elsewhere_stays_there_and_is_not_overwritten(
    pooled: PoolSender,
) -> None:
    # As after a recovery, when the sender has it in another slot, and does not know what the peer has.
    assert pooled.send(1, {0: (0, 1), 1: (1, 1)})
    pooled.replicator._versions.forget(HOLDER)
    before = bytes(pooled.replica.mapping)
    spoiled = pooled.pool.offset_of(2)
    region, index = own_state(pooled.tmp_path, 2)
    slots = enumerate((2, 0))
    units = dict(put_in_slot(pooled.pool, slot, each, iteration=1) for each, slot in slots)
    pooled.pool.mapping[spoiled] ^= 0x20  # the peer's is the good one
    index = add_units(region, index, units)
    assert pooled.replicator.replicate(replica_of(region, index, 1, pooled.pool))
    assert pooled.sent[-1] == tuple(EXPERTS[:2])
    assert pooled.readable() == {1: EXPERTS[:2], 2: EXPERTS[:2]}
    first = pooled.replica.offset_of(2)
    assert pooled.replica.mapping[:first] == before[:first]


def test_version_that_is_corrupt_is_refused(pooled: PoolSender, reports: EventQueue) -> None:
    region, index = own_state(pooled.tmp_path, 5)
    name, unit = put_in_slot(pooled.pool, 0, 0)
    index = add_units(region, index, {name: unit})
    pooled.pool.mapping[unit.offset] ^= 0x20
    assert not pooled.replicator.replicate(replica_of(region, index, None, pooled.pool))
    assert f"unit {name} does not match its checksum" in reports.drain()[-1].fields["reason"]
    assert pooled.readable() == {}
