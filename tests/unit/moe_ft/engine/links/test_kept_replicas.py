"""Windows at a peer: nothing replaces what must be kept, and nothing corrupt is taken."""

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.links.messages import Deadline, Put, Reply, receive_header, send, send_all
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import encode
from tests.unit.moe_ft.builders import (
    WindowState,
    make_window,
)
from tests.unit.moe_ft.engine.links.window_sender import ENDS, LENGTH, NEW, OLD, Sender, window_at
from tests.unit.moe_ft.peer import SOURCE, no_fault, served_connections
from tests.waiting import wait_for

DEADLINE_S = 120.0
EMBEDDING = "embedding"


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    sender = Sender(tmp_path)
    yield sender
    sender.close()


# Replicas that must be kept


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
    monkeypatch.setattr("moe_ft.engine.links.messages.PROGRESS_TIMEOUT_S", 0.2)
    replica = sender.replica(NEW, 0, keep=None)
    content = encode(replica.index)
    with sender.peer.connect_raw() as connection:
        request = Put(SOURCE, None, len(content), 0, replica.end_byte)
        with suppress(ConnectionError):  # it has given up already, if this machine is busy
            send(connection, request, Deadline(DEADLINE_S))
            send_all(connection, content, Deadline(DEADLINE_S))
        connection.settimeout(0.05)  # this is how slow the sender is
        end_s = time.monotonic() + DEADLINE_S
        reply = b""
        while not reply:
            assert time.monotonic() < end_s, "the peer receives a byte every 0.05 s and is patient"
            with suppress(ConnectionError):  # the answer is there
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
