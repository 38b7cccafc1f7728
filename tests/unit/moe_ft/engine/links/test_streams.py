"""Bodies over several streams: pieces land in their places, and what breaks ends all of it."""

import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe_ft.engine.links import streams
from moe_ft.engine.links.messages import REPLY, Join, receive_header, send
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.links.streams import Streams
from moe_ft.engine.links.transport import Deadline, TcpConnection
from moe_ft.errors import CorruptStateError
from tests.unit.moe_ft.peer import (
    DEADLINE_S,
    TOKEN,
    Peer,
    no_fault,
    own_state,
    replica_of,
    served_connections,
)
from tests.waiting import wait_for

NUM_STREAMS, PIECE_BYTES = 3, 100
Pair = tuple[Streams, Streams]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bodies of these tests be large ones."""
    monkeypatch.setattr(streams, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return the two sides of a pair of ranks."""
    sockets = [socket.socketpair() for _ in range(NUM_STREAMS)]
    left, right = (Streams(*map(TcpConnection, side)) for side in zip(*sockets, strict=True))
    yield left, right
    left.close()
    right.close()


def far() -> Deadline:
    return Deadline(DEADLINE_S)


def running_streams() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "moe_ft-stream"]


@pytest.mark.parametrize("seed", range(10))
def test_pieces_land_in_their_places_whatever_stream_they_take(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    contents = [rng.randbytes(rng.choice((0, 1, 99, 100, 101, 1234))) for _ in range(8)]
    contents.append(rng.randbytes(2 * PIECE_BYTES))
    is_wanted = [rng.random() < 0.7 for _ in contents]
    targets = [bytearray(len(each)) for each in contents]
    num_bytes = sum(map(len, contents))
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(pair[0].send_body, map(memoryview, contents), num_bytes, far())
        found = [
            memoryview(each) if wanted else len(each)
            for each, wanted in zip(targets, is_wanted, strict=True)
        ]
        pair[1].receive_body(found, num_bytes, far())
        sent.result()
    for content, target, wanted in zip(contents, targets, is_wanted, strict=True):
        assert target == (content if wanted else bytes(len(content)))


def head(number: int, place: int, num_bytes: int) -> bytes:
    return struct.pack(">QQQ", number, place, num_bytes)


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([(1, 0, 100), (1, 100, 50), (1, 150, 0)], "pieces of a body are missing"),
        ([(1, 0, 100), (1, 0, 100), (1, 200, 0)], "pieces of a body are missing"),
        ([(1, 50, 100), (1, 0, 100), (1, 200, 0)], "pieces of a body are missing"),
        ([(1, 150, 100)], "a piece that does not belong to this body"),
        ([(1, 1 << 63, 1)], "a piece that does not belong to this body"),
        ([(2, 0, 100)], "a piece that does not belong to this body"),
        ([(0, 0, 0)], "a piece that does not belong to this body"),
    ],
)
def test_pieces_that_do_not_cover_a_body_are_refused(
    pieces: list[tuple[int, int, int]], problem: str
) -> None:
    sockets = [socket.socketpair() for _ in range(2)]
    receiver = Streams(*(TcpConnection(each) for _, each in sockets))
    (first, _), (second, _) = sockets
    for number, place, num_bytes in pieces:
        first.sendall(head(number, place, num_bytes) + bytes(min(num_bytes, PIECE_BYTES)))
    second.sendall(head(1, 200, 0))
    with pytest.raises(ConnectionError, match=problem):
        receiver.receive_body([memoryview(bytearray(200))], 200, far())
    for each in (first, second, receiver):
        each.close()


def test_replica_over_several_streams_is_kept_bit_for_bit_and_read_back(
    tmp_path: Path, peer: Peer
) -> None:
    region, index = own_state(tmp_path, 5)
    assert peer.server.address is not None
    connection = PeerConnection(peer.server.address, TOKEN, NUM_STREAMS)
    connection.put(replica_of(region, index, 4), (), no_fault)
    assert connection._connection is not None
    assert len(connection._connection._all) == NUM_STREAMS
    assert connection._connection._num_bodies == 1
    assert peer.committed() == {5: bytes(region.mapping)}
    path = f"{peer.regions[0].directory.name}/{index.file}"
    assert connection.get(path) == bytes(region.mapping)
    assert connection._connection._num_bodies == 2
    connection.close()
    wait_for(lambda: not served_connections(), "all streams to end with their pair")


@pytest.mark.parametrize("number", range(NUM_STREAMS))
def test_stream_that_dies_ends_the_transfer_and_nothing_is_kept_or_still_written(
    tmp_path: Path, peer: Peer, number: int
) -> None:
    region, index = own_state(tmp_path, 5)
    assert peer.server.address is not None
    connection = PeerConnection(peer.server.address, TOKEN, NUM_STREAMS)
    dying = connection._connected()._all[number]

    def die(*_: object) -> None:
        dying.end()

    with pytest.raises(OSError):  # noqa: PT011 - whatever the network says
        connection.put(replica_of(region, index, 4), (), die)
    assert connection._connection is None
    wait_for(lambda: not served_connections(), "the peer to give up all streams")
    assert not running_streams()
    assert peer.committed() == {}
    connection.put(replica_of(region, index, 4), (), no_fault)
    assert peer.committed() == {5: bytes(region.mapping)}
    connection.close()


def test_replica_that_is_refused_leaves_the_streams_in_order(tmp_path: Path, peer: Peer) -> None:
    region, index = own_state(tmp_path, 5)
    assert peer.server.address is not None
    connection = PeerConnection(peer.server.address, TOKEN, NUM_STREAMS)
    connection.put(replica_of(region, index, 4), (), no_fault)
    before = connection._connection
    older, its_index = own_state(tmp_path, 4, number=1)
    with pytest.raises(CorruptStateError, match="iteration 4 comes after iteration 5"):
        connection.put(replica_of(older, its_index, None), (), no_fault)
    connection.put(replica_of(region, index, 4), (), no_fault)
    assert connection._connection is before
    connection.close()


def test_streams_of_a_pair_that_nobody_completes_are_given_up(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PROGRESS_TIMEOUT_S", 0.05)
    with peer.connect_raw() as raw:
        connection = TcpConnection(raw)
        send(connection, Join("pair"), far())
        assert not REPLY.decode(receive_header(connection, far())).error
        wait_for(lambda: not peer.server._loans._waiting, "it to be given up")
        send(connection, Join("pair", 1), far())
        assert "0 streams are there, not 1" in REPLY.decode(receive_header(connection, far())).error
