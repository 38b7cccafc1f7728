"""Serving a node's memory to peers, and nothing else."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_ft.engine.background import Report, Reports
from moe_ft.engine.links.messages import Deadline, Get, send
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.links.server import PeerServer
from tests.unit.moe_ft.engine.links.conftest import PATIENCE_S
from tests.unit.moe_ft.peer import (
    DEADLINE_S,
    HOST,
    TOKEN,
    LeapingClock,
    Peer,
    served_connections,
)
from tests.waiting import wait_for

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.close()


# Files


def test_file_of_the_node_is_served_whole(peer: Peer) -> None:
    (peer.node_dir / "file").write_bytes(b"0123456789")
    assert peer.connect().get("file") == b"0123456789"


def test_file_in_a_directory_of_the_node_is_served(peer: Peer) -> None:
    directory = peer.regions[0].directory
    (directory / "file").write_bytes(b"0123456789")
    assert peer.connect().get(f"{directory.name}/file", 2, 3) == b"234"


@pytest.mark.parametrize(
    ("offset", "num_bytes", "expected"),
    [(0, 3, b"012"), (7, -1, b"789"), (7, 100, b"789"), (10, -1, b""), (99, 1, b""), (2, 0, b"")],
)
def test_range_of_a_file_is_served_as_far_as_it_exists(
    peer: Peer, offset: int, num_bytes: int, expected: bytes
) -> None:
    (peer.node_dir / "file").write_bytes(b"0123456789")
    assert peer.connect().get("file", offset, num_bytes) == expected


@pytest.mark.parametrize(("offset", "num_bytes", "field"), [(-5, -1, "offset"), (0, -7, "num_")])
def test_range_that_is_negative_is_refused_as_an_error(
    peer: Peer, offset: int, num_bytes: int, field: str
) -> None:
    (peer.node_dir / "file").write_bytes(b"0123456789")
    with pytest.raises(OSError, match=rf"Expected `int` >= .* at `\$\.{field}"):
        peer.connect().get("file", offset, num_bytes)


def test_connection_serves_many_requests_also_after_an_error(peer: Peer) -> None:
    (peer.node_dir / "file").write_bytes(b"0123456789")
    connection = peer.connect()
    with pytest.raises(OSError, match="No such file"):
        connection.get("missing")
    assert connection.get("file", 4, 2) == b"45"


def test_empty_file_is_served(peer: Peer) -> None:
    (peer.node_dir / "empty").touch()
    assert peer.connect().get("empty") == b""


def test_directory_is_refused_as_an_error(peer: Peer) -> None:
    with pytest.raises(OSError, match="is not a regular file"):
        peer.connect().get(peer.regions[0].directory.name)


def test_pipe_is_refused_at_once(peer: Peer) -> None:
    os.mkfifo(peer.node_dir / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        peer.connect().get("pipe")


@pytest.mark.parametrize(
    "path", ["../x", "/etc/hostname", "a/../../b", "..", "", "a\0b", "a\\..\\b"]
)
def test_path_outside_of_the_nodes_memory_is_refused(tmp_path: Path, peer: Peer, path: str) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    with pytest.raises(OSError, match="leaves its directory"):
        peer.connect().get(path)


@pytest.mark.parametrize("path", ["link", "directory/x"])
def test_symbolic_link_is_not_followed(tmp_path: Path, peer: Peer, path: str) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    (peer.node_dir / "link").symlink_to(tmp_path / "x")
    (peer.node_dir / "directory").symlink_to(tmp_path)
    with pytest.raises(OSError, match="is a symbolic link"):
        peer.connect().get(path)


def test_peer_that_reads_a_trickle_is_given_up(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.engine.links.messages.PROGRESS_TIMEOUT_S", 0.2)
    num_bytes = 64 << 20  # more than the buffers of a connection hold
    with (peer.node_dir / "file").open("wb") as file:
        file.truncate(num_bytes)
    monkeypatch.setattr("moe_ft.engine.links.messages.SLOWEST_BYTES_PER_S", 10 * num_bytes)
    num_read, is_over = 0, threading.Event()
    wait_for(lambda: not served_connections(), "those of other tests to end")
    with peer.connect_raw() as connection:
        (server,) = served_connections()
        send(connection, Get("file", 0, -1), Deadline(DEADLINE_S))
        while server.is_alive():
            num_read += len(connection.recv(1 << 12))
            is_over.wait(0.02)  # this is how slow the peer is
        while content := connection.recv(1 << 20):  # what was under way
            num_read += len(content)
    assert num_read < num_bytes


# Who is served


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN.upper(), "töken", "x" * 10_000])
def test_peer_with_a_wrong_token_is_refused(peer: Peer, token: str) -> None:
    (peer.node_dir / "file").write_bytes(b"secret")
    with pytest.raises(OSError, match="the token is wrong: another job or an older start"):
        peer.connect(token).get("file")


def test_server_that_has_no_token_yet_answers_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is tried twice, and then the time is over.
    clock, pauses = LeapingClock(monkeypatch), iter((0.0, 2 * PATIENCE_S))
    pausing = SimpleNamespace(sleep=lambda seconds: clock.leap(next(pauses)))
    monkeypatch.setattr("moe_ft.engine.links.peers.time", pausing)
    server = PeerServer(tmp_path, HOST)
    server.start()
    assert server.address is not None
    with (
        closing(server),
        closing(PeerConnection(server.address, "")) as connection,
        pytest.raises(TimeoutError, match="closes connections before it lets anybody in"),
    ):
        connection.get("file")


@pytest.mark.parametrize("host", [HOST, "localhost", pytest.param("::1", marks=needs_ipv6)])
def test_server_is_reached_by_its_address_and_its_name(tmp_path: Path, host: str) -> None:
    node_dir = tmp_path / "node"
    node_dir.mkdir(mode=0o700)
    (node_dir / "file").write_bytes(b"data")
    server = PeerServer(node_dir, host)
    server.start()
    server.admit(TOKEN)
    assert server.address is not None
    with closing(server), closing(PeerConnection(server.address, TOKEN)) as connection:
        assert connection.get("file") == b"data"


def test_server_that_was_closed_refuses_connections(peer: Peer) -> None:
    peer.server.close()
    with pytest.raises(ConnectionRefusedError):
        peer.connect().get("file")


# Failures of its own


def test_failures_before_and_after_there_are_reports_are_all_reported(tmp_path: Path) -> None:
    server, reports = PeerServer(tmp_path, HOST), Reports()
    server._report("before")
    server.keep({}, reports)
    server._report("after")
    assert reports.drain() == [
        Report(event="degraded", iteration=0, fields={"part": "peer-server", "reason": reason})
        for reason in ("before", "after")
    ]
