"""Windows at a peer: they arrive stretch by stretch, and never replace what must be kept."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.background import Reports
from moe_ft.engine.clock import Clock
from moe_ft.engine.memory import ReplicaMemory
from moe_ft.engine.peer_messages import Deadline, Put, Reply, receive_header, send, send_all
from moe_ft.engine.peers import PeerReplicator, Replica
from moe_ft.engine.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.format.contents import check_units
from moe_ft.format.encoding import decode, encode
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.recovery.readers import MemoryReader, read_unit
from moe_ft.units import Level
from tests.unit.moe_ft.builders import (
    WINDOW_FILE_BYTES,
    WindowState,
    fill_region,
    make_identity,
    make_window,
)
from tests.unit.moe_ft.peer import HOLDER, SOURCE, TOKEN, Peer, no_fault, served_connections
from tests.waiting import wait_for

LENGTH = 3
DEADLINE_S = 30.0
EMBEDDING = "embedding"


class Sender:
    """A rank that takes windows into two regions, and the peer that gets them.

    Attributes:
        fails_at: iterations at which sending breaks off in the middle.
        stretches: (first byte, last byte) of all that was sent, whether it arrived or not.
    """

    def __init__(self, directory: Path) -> None:
        self.peer = Peer(directory, WINDOW_FILE_BYTES)
        self.reports = Reports()
        self.fails_at: set[int] = set()
        self.stretches: list[tuple[int, int]] = []
        self.replicator = PeerReplicator([self.peer.info], TOKEN, self.reports, self._hook, Clock())
        self.pair = self.replicator._pairs[HOLDER]
        self._spy_on_connection()
        self.regions = [Region(directory / "own", number, WINDOW_FILE_BYTES) for number in (0, 1)]
        for region in self.regions:
            region.open()

    def _spy_on_connection(self) -> None:
        put = self.pair.connection.put

        def spy(replica: Replica, *rest: object) -> None:
            self.stretches.append((replica.start_byte, replica.end_byte))
            put(replica, *rest)  # type: ignore[arg-type]

        self.pair.connection.put = spy  # type: ignore[method-assign]

    def _hook(self, phase: Phase, iteration: int) -> None:
        assert phase is Phase.REPLICATE
        if iteration in self.fails_at:
            wait_for(served_connections, "the peer to serve the connection")
            raise RuntimeError("the sender breaks off here")

    def replica(
        self, window: WindowState, position: int, *, keep: int | None, region: int = 0
    ) -> Replica:
        """Have a snapshot of a window committed, and return what peers are to get of it."""
        own = self.regions[region]
        start, end = window.stretch(position)
        own.mapping[start:end] = window.content[start:end]
        index = msgspec.structs.replace(window.up_to(position + 1), file=own.data_path.name)
        own.commit(encode(index), index.iteration)
        return Replica(
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

    def send_replica(self, replica: Replica) -> bool:
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

    def reasons(self) -> list[str]:
        """Return why something was not taken since the last call."""
        return [each.fields["reason"] for each in self.reports.drain() if each.event == "degraded"]

    def close(self) -> None:
        """Close all connections."""
        self.replicator.close()
        self.peer.close()


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    sender = Sender(tmp_path)
    yield sender
    sender.close()


def window_at(first: int, length: int = LENGTH, identity: Identity | None = None) -> WindowState:
    return make_window(SOURCE, first, length, identity)


OLD, NEW = window_at(2), window_at(5)  # which end at iterations 4 and 7
ENDS = NEW.layout.ends


# Stretch by stretch


def test_window_arrives_stretch_by_stretch(sender: Sender) -> None:
    for position in range(LENGTH):
        assert sender.send(NEW, position)
        assert sender.found() == {5 + position: position + 1}
    assert sender.stretches == [(0, ENDS[0]), (ENDS[0], ENDS[1]), (ENDS[1], ENDS[2])]


def test_window_at_the_peer_is_that_of_the_sender_bit_for_bit(sender: Sender) -> None:
    sender.send_all(NEW)
    (content,) = sender.peer.committed().values()
    assert content[: ENDS[-1]] == NEW.content[: ENDS[-1]]


def test_index_at_the_peer_is_that_of_the_sender_behind_every_stretch(sender: Sender) -> None:
    for position in range(LENGTH):
        sender.send(NEW, position)
        (path,) = sender.peer.regions[0].directory.glob("region_*.json")
        found = decode(path.read_bytes(), Index, str(path))
        expected = NEW.up_to(position + 1)
        assert msgspec.structs.replace(found, file=expected.file) == expected


def test_all_versions_of_a_window_are_read_from_a_replica(sender: Sender) -> None:
    sender.send_all(NEW)
    (path,) = sender.peer.regions[0].directory.glob("region_*.json")
    reader = MemoryReader(path)
    for name, unit in NEW.index.entries():
        position = None if unit.level == Level.FULL else unit.iteration - NEW.first_iteration
        entry, content = read_unit(reader, name, position)
        assert entry == unit
        assert content == NEW.content[unit.offset : unit.offset + unit.num_bytes]


def test_what_was_sent_is_reported(sender: Sender) -> None:
    sender.send_all(NEW)
    reports = sender.reports.drain()
    assert [each.event for each in reports] == ["replicate"] * LENGTH
    assert [each.iteration for each in reports] == [5, 6, 7]
    sizes = [end - start for start, end in sender.stretches]
    assert [each.fields["bytes"] for each in reports] == sizes


@pytest.mark.parametrize("length", [1, 2, 4])
def test_windows_of_any_length_follow_each_other(sender: Sender, length: int) -> None:
    sender.send_all(OLD)
    other = window_at(5, length)
    sender.send_all(other, keep=4, region=1)
    assert sender.found() == {4: LENGTH, 4 + length: length}


# Peers that miss a snapshot


@pytest.mark.parametrize("position", [0, 1])
def test_peer_that_missed_a_snapshot_gets_all_from_the_first_byte_with_the_next(
    sender: Sender, position: int
) -> None:
    sender.fails_at = {5 + position}
    for each in range(LENGTH):
        assert sender.send(NEW, each) == (each != position)
    assert sender.stretches[position + 1] == (0, ENDS[position + 1])
    assert sender.found() == {7: LENGTH}


def test_peer_that_got_everything_again_gets_stretches_again(sender: Sender) -> None:
    sender.fails_at = {5}
    for position in range(LENGTH):
        sender.send(NEW, position)
    assert sender.stretches == [(0, ENDS[0]), (0, ENDS[1]), (ENDS[1], ENDS[2])]


def test_bytes_of_a_window_that_was_sent_from_its_beginning_are_all_reported(
    sender: Sender,
) -> None:
    sender.fails_at = {5}
    sender.send(NEW, 0)
    sender.send(NEW, 1)
    report = sender.reports.drain()[-1]
    assert (report.event, report.fields["bytes"]) == ("replicate", ENDS[1])


def test_peer_that_missed_the_last_snapshot_gets_the_next_window_as_usual(sender: Sender) -> None:
    sender.fails_at = {7}
    for position in range(LENGTH):
        sender.send(NEW, position)
    following = window_at(8)
    sender.send_all(following, keep=7, region=1)
    assert sender.found()[10] == LENGTH


def test_peer_that_lost_its_memory_gets_everything_with_the_snapshot_after_the_next(
    sender: Sender,
) -> None:
    sender.send(NEW, 0)
    for region in sender.peer.regions:
        region.invalidate()
    assert not sender.send(NEW, 1)
    assert "there is no window that iteration 6 continues" in sender.reasons()[0]
    assert sender.send(NEW, 2)
    assert sender.found() == {7: LENGTH}


def test_peer_that_was_opened_again_does_not_go_on_with_what_it_finds(sender: Sender) -> None:
    # What a process before left there may be of any start.
    sender.send(NEW, 0)
    again = tuple(
        Region(region.directory, region.number, region.num_bytes) for region in sender.peer.regions
    )
    for region in again:
        region.open()
    sender.peer.keep({SOURCE: ReplicaMemory(regions=again, pool=None)})
    assert not sender.send(NEW, 1)
    assert sender.send(NEW, 2)
    assert sender.found() == {7: LENGTH}


def test_older_window_goes_before_a_newer_one_where_nothing_must_be_kept(sender: Sender) -> None:
    # What was recovered is sent again to peers that had not got it, and nothing else must be lost for it.
    sender.send_all(OLD)
    sender.send(NEW, 0, keep=4, region=1)
    newest = window_at(8)
    sender.send_all(newest, region=1)  # in place of what was begun
    assert sender.found() == {4: LENGTH, 10: LENGTH}
    sender.send_all(window_at(11), region=0)
    assert sender.found() == {10: LENGTH, 13: LENGTH}


def test_of_two_states_of_the_iteration_to_keep_the_one_stays_that_a_recovery_prefers(
    sender: Sender,
) -> None:
    # A training that ended leaves a window and, at the same iteration, one snapshot of everything.
    sender.send_all(NEW)
    sender.send_all(window_at(7, 1), keep=7, region=1)
    assert len(list(sender.peer.regions[0].directory.glob("region_*.json"))) == 2
    sender.send_all(window_at(8), keep=7)
    assert sender.found() == {7: 1, 10: LENGTH}


# Stretches that do not continue what is there


def of_another_layout(window: WindowState) -> WindowState:
    index = msgspec.structs.replace(window.index, header_checksum="0" * 16)
    return replace(window, index=index)


def of_another_start(window: WindowState) -> WindowState:
    return window_at(window.first_iteration, LENGTH, make_identity(history=((0, 0), (1, 4))))


def of_another_length(window: WindowState) -> WindowState:
    return window_at(window.first_iteration, LENGTH + 1)


def of_another_iteration(window: WindowState) -> WindowState:
    return window_at(window.first_iteration + 1)


@pytest.mark.parametrize(
    "other", [of_another_layout, of_another_start, of_another_length, of_another_iteration]
)
def test_stretch_that_does_not_continue_what_is_there_is_refused_and_nothing_lost(
    sender: Sender, other: Callable[[WindowState], WindowState]
) -> None:
    sender.send_all(OLD)
    sender.send(NEW, 0, keep=4, region=1)
    before = sender.peer.committed()
    replica = sender.replica(other(NEW), 1, keep=4)
    with pytest.raises(CorruptStateError, match="there is no window that iteration . continues"):
        sender.peer.connect().put(replica, (), no_fault)
    assert sender.peer.committed() == before
    assert sender.found() == {4: LENGTH, 5: 1}


@pytest.mark.parametrize("position", [1, 2])
def test_stretch_for_a_window_that_the_peer_does_not_have_is_refused_and_nothing_lost(
    sender: Sender, position: int
) -> None:
    sender.send_all(OLD)
    before = sender.peer.committed()
    replica = sender.replica(NEW, position, keep=4, region=1)
    with pytest.raises(CorruptStateError, match="there is no window that iteration"):
        sender.peer.connect().put(replica, (), no_fault)
    assert sender.peer.committed() == before


def test_stretch_that_skips_one_is_refused(sender: Sender) -> None:
    sender.send(NEW, 0)
    replica = sender.replica(NEW, 2, keep=None)
    with pytest.raises(CorruptStateError, match="there is no window that iteration 7 continues"):
        sender.peer.connect().put(replica, (), no_fault)
    assert sender.found() == {5: 1}


def test_stretch_that_was_sent_twice_is_refused_the_second_time(sender: Sender) -> None:
    sender.send(NEW, 0)
    sender.send(NEW, 1)
    replica = sender.replica(NEW, 1, keep=None)
    with pytest.raises(CorruptStateError, match="there is no window that iteration 6 continues"):
        sender.peer.connect().put(replica, (), no_fault)
    assert sender.found() == {6: 2}


def test_connection_goes_on_after_a_stretch_was_refused(sender: Sender) -> None:
    connection = sender.peer.connect()
    with pytest.raises(CorruptStateError):
        connection.put(sender.replica(NEW, 1, keep=None), (), no_fault)
    connection.put(sender.replica(NEW, 0, keep=None), (), no_fault)
    connection.put(sender.replica(NEW, 1, keep=None), (), no_fault)
    assert sender.found() == {6: 2}


def test_window_for_a_region_of_another_size_is_refused(sender: Sender, tmp_path: Path) -> None:
    region, index = fill_region(tmp_path / "other", rank=SOURCE)
    replica = Replica(
        region=region,
        pool=None,
        index=index,
        start_byte=0,
        end_byte=index.header_bytes,
        keep_iteration=None,
    )
    message = f"of {index.file_bytes} bytes; expected {WINDOW_FILE_BYTES} bytes"
    with pytest.raises(CorruptStateError, match=message):
        sender.peer.connect().put(replica, (), no_fault)


# What must be kept


@pytest.mark.parametrize("position", [0, 1, 2])
def test_complete_window_is_kept_while_the_next_one_fails_at_any_snapshot(
    sender: Sender, position: int
) -> None:
    sender.send_all(OLD)
    kept = sender.peer.committed()[4]
    sender.fails_at = {5 + position}
    for each in range(LENGTH):
        sender.send(NEW, each, keep=4, region=1)
        assert sender.found()[4] == LENGTH
        assert sender.peer.committed()[4] == kept


def test_complete_window_is_kept_while_many_others_are_given_up(sender: Sender) -> None:
    sender.send_all(OLD)
    kept = sender.peer.committed()[4]
    for first in range(5, 15):
        window = window_at(first)
        for position in range(first % LENGTH):
            assert sender.send(window, position, keep=4, region=1)
    assert sender.peer.committed()[4] == kept


def test_window_that_is_given_up_is_replaced_and_not_the_complete_one(sender: Sender) -> None:
    sender.send_all(OLD)
    sender.send(NEW, 0, keep=4, region=1)
    sender.send(NEW, 1, keep=4, region=1)
    assert sender.send(window_at(8), 0, keep=4, region=1)
    assert sender.found() == {4: LENGTH, 8: 1}


def test_window_that_is_complete_makes_the_one_before_it_free(sender: Sender) -> None:
    sender.send_all(OLD)
    sender.send_all(NEW, keep=4, region=1)
    sender.send(window_at(8), 0, keep=7)
    assert sender.found() == {7: LENGTH, 8: 1}


def test_last_state_at_the_iteration_of_the_complete_window_does_not_replace_it(
    sender: Sender,
) -> None:
    # At the end of training everything is saved at once, perhaps at the iteration of a complete window.
    sender.send_all(OLD)
    kept = sender.peer.committed()[4]
    sender.send_all(window_at(4, 1), keep=4, region=1)
    contents = [region.data_path.read_bytes() for region in sender.peer.regions]
    assert kept in contents


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
    with sender.peer.connect_raw() as connection:
        send(connection, Put(SOURCE, None, len(content), 0, late.end_byte), deadline)
        send_all(connection, content[:100], deadline)
        wait_for(served_connections, "the peer to serve the connection")
        sender.send_all(NEW)
        sender.send(window_at(8), 0, keep=7, region=1)
        send_all(connection, content[100:], deadline)
        send_all(connection, memoryview(late.region.mapping)[: late.end_byte], deadline)
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
    with sender.peer.connect_raw() as connection:
        for index in (content, own):
            send(connection, Put(SOURCE, None, len(index), 0, replica.end_byte), deadline)
            send_all(connection, index, deadline)
            send_all(connection, data, deadline)
            reply = receive_header(connection, deadline)
            errors.append(msgspec.json.decode(reply, type=Reply).error)
    assert errors == [f"an index of rank {SOURCE + 1} in a replica of rank {SOURCE}", ""]
    assert sender.found() == {5: 1}


@pytest.mark.parametrize("field", ["index_bytes", "start_byte", "data_bytes", "slot_bytes"])
def test_replica_of_a_negative_size_is_refused(sender: Sender, field: str) -> None:
    request = msgspec.structs.replace(Put(SOURCE, None, 0, 0, 0), **{field: -1})
    with sender.peer.connect_raw() as connection:
        send(connection, request, Deadline(DEADLINE_S))
        reply = receive_header(connection, Deadline(DEADLINE_S))
    assert f"`$.{field}`" in msgspec.json.decode(reply, type=Reply).error


def test_replica_that_trickles_is_given_up(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.engine.peer_messages.PROGRESS_TIMEOUT_S", 0.2)
    replica = sender.replica(NEW, 0, keep=None)
    content = encode(replica.index)
    with sender.peer.connect_raw() as connection:
        request = Put(SOURCE, None, len(content), 0, replica.end_byte)
        send(connection, request, Deadline(DEADLINE_S))
        send_all(connection, content, Deadline(DEADLINE_S))
        connection.settimeout(0.05)  # this is how slow the sender is
        end_s = time.monotonic() + DEADLINE_S
        reply = b""
        while not reply:
            assert time.monotonic() < end_s, "the peer receives a byte every 0.05 s and is patient"
            connection.send(b"x")
            with suppress(TimeoutError):
                reply = connection.recv(1 << 10)
    assert b"not done within 0.2 s" in reply or b"timed out" in reply
    assert sender.found() == {}


# Stretches that are corrupt


@pytest.mark.parametrize("position", [0, 1, 2])
def test_stretch_that_is_corrupt_is_refused_and_the_complete_window_intact(
    sender: Sender, position: int
) -> None:
    sender.send_all(OLD)
    kept = sender.peer.committed()[4]
    for each in range(position):
        assert sender.send(NEW, each, keep=4, region=1)
    assert not _send_perhaps_spoiled(sender, NEW, position, 4, 1, spoils=True)
    assert "does not match its checksum" in sender.reasons()[0]
    assert sender.peer.committed() == {4: kept}


@pytest.mark.parametrize("num_elements", [32, 33])
def test_stretch_whose_first_version_is_corrupt_is_refused_with_and_without_a_gap_before_it(
    sender: Sender, num_elements: int
) -> None:
    window = make_window(SOURCE, 5, num_elements=num_elements)
    has_gap = window.layout.snapshots[1][0].offset > window.stretch(1)[0]
    assert has_gap == (num_elements == 33)
    sender.send(window, 0)
    assert not _send_perhaps_spoiled(sender, window, 1, None, 0, spoils=True)


def test_window_after_a_corrupt_stretch_is_sent_again_from_its_beginning(sender: Sender) -> None:
    sender.send(NEW, 0)
    assert not _send_perhaps_spoiled(sender, NEW, 1, None, 0, spoils=True)
    assert sender.send(NEW, 2)
    assert sender.stretches[-1] == (0, ENDS[2])
    assert sender.found() == {7: LENGTH}


@pytest.mark.parametrize("level", ["units", "compute"])
def test_stretch_whose_index_has_another_checksum_is_refused(sender: Sender, level: str) -> None:
    sender.send(NEW, 0)
    replica = sender.replica(NEW, 1, keep=None)
    index = replica.index
    if level == "units":
        name = next(name for name, unit in index.units.items() if unit.iteration == 6)
        unit = msgspec.structs.replace(index.units[name], checksum="0" * 16)
        index = msgspec.structs.replace(index, units={**index.units, name: unit})
    else:
        unit = msgspec.structs.replace(index.compute[1][EMBEDDING], checksum="0" * 16)
        index = msgspec.structs.replace(index, compute=(index.compute[0], {EMBEDDING: unit}))
    with pytest.raises(CorruptStateError, match="does not match its checksum"):
        sender.peer.connect().put(replace(replica, index=index), (), no_fault)


def test_beginning_that_went_bad_at_the_sender_is_found_when_it_is_sent_again(
    sender: Sender,
) -> None:
    sender.fails_at = {6}
    sender.send(NEW, 0)
    sender.send(NEW, 1)
    replica = sender.replica(NEW, 2, keep=None)
    replica.region.mapping[NEW.layout.snapshots[0][0].offset] ^= 0x01
    assert not sender.send_replica(replica)
    assert "does not match its checksum" in sender.reasons()[-1]
    assert sender.found() == {}


def test_stretch_that_breaks_off_leaves_the_snapshots_before_it_intact(sender: Sender) -> None:
    sender.send(NEW, 0)
    sender.fails_at = {6}
    sender.send(NEW, 1)
    assert sender.found() == {5: 1}
