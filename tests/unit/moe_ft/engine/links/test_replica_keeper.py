"""Windows at a peer: they arrive stretch by stretch, and continue what is there."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.links.peers import Replica
from moe_ft.engine.memory.rank_memory import ReplicaMemory
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.recovery.readers import MemoryReader, read_unit
from moe_ft.units import Level
from tests.unit.moe_ft.builders import (
    WINDOW_FILE_BYTES,
    WindowState,
    fill_region,
    make_identity,
)
from tests.unit.moe_ft.engine.links.window_sender import ENDS, LENGTH, NEW, OLD, Sender, window_at
from tests.unit.moe_ft.peer import SOURCE, no_fault


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    sender = Sender(tmp_path)
    yield sender
    sender.close()


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
    # An earlier process may have left a region of any start there.
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
    # Recovered state is sent again to peers that lack it; no other state may be lost for it.
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
