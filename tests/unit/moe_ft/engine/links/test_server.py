"""Serving a node: who is let in, what they get of its memory, and nothing else."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ft.engine.background import EngineEvent, EventQueue
from moe_ft.engine.links.listener import PeerListener
from moe_ft.engine.links.messages import Get, send
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.links.transport import Connection, Deadline, TcpConnection
from tests.unit.moe_ft.engine.links.conftest import PATIENCE_S
from tests.unit.moe_ft.peer import (
    DEADLINE_S,
    HOST,
    TOKEN,
    LeapingClock,
    Peer,
    authenticated,
    served_connections,
)
from tests.waiting import wait_for

# Files


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
    assert bytes(connection.get("file", 4, 2)) == b"45"


def test_directory_and_pipe_are_refused_at_once(peer: Peer) -> None:
    os.mkfifo(peer.node_dir / "pipe")
    for path in ("pipe", peer.regions[0].directory.name):
        with pytest.raises(OSError, match="is not a regular file"):
            peer.connect().get(path)


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
    monkeypatch.setattr("moe_ft.engine.links.transport.PROGRESS_TIMEOUT_S", 0.2)
    num_bytes = 64 << 20  # more than the buffers of a connection hold
    with (peer.node_dir / "file").open("wb") as file:
        file.truncate(num_bytes)
    monkeypatch.setattr("moe_ft.engine.links.transport.SLOWEST_BYTES_PER_S", 10 * num_bytes)
    num_read, is_over = 0, threading.Event()
    wait_for(lambda: not served_connections(), "those of other tests to end")
    with peer.connect_raw() as connection:
        (server,) = served_connections()
        send(TcpConnection(connection), Get("file", 0, -1), Deadline(DEADLINE_S))
        while server.is_alive():
            num_read += len(connection.recv(1 << 12))
            is_over.wait(0.02)  # this is how slow the peer is
        while content := connection.recv(1 << 20):  # what was under way
            num_read += len(content)
    assert num_read < num_bytes


# Who is served


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
        pytest.raises(TimeoutError, match="refuses connections before authentication"),
    ):
        connection.get("file")


# Failures of its own


def test_failures_before_and_after_there_are_reports_are_all_reported(tmp_path: Path) -> None:
    server, reports = PeerServer(tmp_path, HOST), EventQueue()
    server._report("before")
    server.keep({}, reports)
    server._report("after")
    assert reports.drain() == [
        EngineEvent(event="degraded", iteration=0, fields={"part": "peer-server", "reason": reason})
        for reason in ("before", "after")
    ]


NUM_STRANGERS = 3


class Listening:
    """A listener that answers one word to whoever is let in."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.listener = PeerListener(HOST, self._serve, self.reasons.append)
        self.address = (HOST, 0)

    def _serve(self, peer: Connection) -> None:
        peer.send(b"hi", Deadline(DEADLINE_S))

    def start(self) -> None:
        """Listen, and let in those with the token."""
        self.address = (HOST, self.listener.start())
        self.listener.admit(TOKEN)

    def answers(self) -> bool:
        """Return whether a peer is served."""
        with suppress(ConnectionError), authenticated(self.address) as peer:
            return peer.recv(2) == b"hi"
        return False


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    monkeypatch.setattr("moe_ft.engine.links.listener.MAX_STRANGERS", NUM_STRANGERS)
    monkeypatch.setattr("moe_ft.engine.links.listener._PAUSE_S", 0.01)
    listening = Listening()
    yield listening
    listening.listener.close()


def stranger(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, DEADLINE_S)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection, after whatever it said."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 10):
            pass
    return True


# Strangers


def test_strangers_beyond_the_most_are_closed_at_once(listening: Listening) -> None:
    listening.start()
    with ExitStack() as stack:
        for _ in range(NUM_STRANGERS):
            assert stack.enter_context(stranger(listening.address)).recv(1)  # the challenge
        assert stack.enter_context(stranger(listening.address)).recv(1) == b""


def test_peers_are_no_strangers_once_they_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.engine.links.listener.MAX_STRANGERS", 1)
    with ExitStack() as stack:
        served = threading.Event()
        stack.callback(served.set)

        def serve(_: Connection) -> None:
            served.wait(DEADLINE_S)

        listener = PeerListener(HOST, serve, lambda _: None)
        stack.callback(listener.close)
        address = (HOST, listener.start())
        listener.admit(TOKEN)
        for _ in range(3):
            stack.enter_context(authenticated(address))
            wait_for(lambda: listener._strangers._value == 1, "the peer to be let in")


def silence(connection: socket.socket, is_over: threading.Event) -> None:
    """Say nothing."""


def trickle(connection: socket.socket, is_over: threading.Event) -> None:
    """Send a byte now and then."""
    with suppress(OSError):
        while not is_over.wait(0.02):
            connection.send(b"x")


@pytest.mark.parametrize("behave", [silence, trickle])
def test_strangers_lose_their_places_to_peers_after_a_time_in_total(
    listening: Listening,
    behave: Callable[[socket.socket, threading.Event], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moe_ft.engine.links.listener.STRANGER_S", 0.2)
    listening.start()
    is_over = threading.Event()
    with ExitStack() as stack:
        stack.callback(is_over.set)
        for _ in range(NUM_STRANGERS):
            connection = stack.enter_context(stranger(listening.address))
            threading.Thread(target=behave, args=(connection, is_over)).start()
        wait_for(listening.answers, "a peer to be served")


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n".ljust(64), b"\xff" * 64, bytes(64)])
def test_stranger_that_says_something_else_is_closed_and_peers_are_served(
    listening: Listening, garbage: bytes
) -> None:
    listening.start()
    with stranger(listening.address) as connection:
        connection.sendall(garbage)
        assert is_closed(connection)
    assert listening.answers()
    assert not listening.reasons


# Failures


class FailingSocket(socket.socket):
    """A listening socket that cannot accept for a while.

    Attributes:
        failures: what `accept` raises before it works again.
    """

    failures: list[OSError]

    def accept(self) -> Any:
        """Fail, or accept."""
        if self.failures:
            raise self.failures.pop(0)
        return super().accept()


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS, errno.EINVAL]
)
def test_listener_continues_after_connections_could_not_be_accepted_and_reports_it_once(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def listen(host: str) -> list[socket.socket]:
        listener = FailingSocket(fileno=socket.create_server((host, 0)).detach())
        listener.failures = [OSError(number, "it fails") for _ in range(3)]
        return [listener]

    monkeypatch.setattr("moe_ft.engine.links.listener.listen", listen)
    listening.start()
    assert listening.answers()
    (reason,) = listening.reasons
    assert f"cannot accept connections: {type(OSError(number, '')).__name__}: " in reason
    assert "it fails; tried again every 0.01 s" in reason


def test_listener_continues_after_a_thread_could_not_start_and_reports_it(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, num_failures = threading.Thread.start, NUM_STRANGERS + 1

    def fake(thread: threading.Thread) -> None:
        nonlocal num_failures
        if thread.name == "moe_ft-peer-connection" and num_failures:
            num_failures -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fake)
    listening.start()
    for _ in range(NUM_STRANGERS + 1):
        with stranger(listening.address) as connection:
            assert is_closed(connection)
    assert listening.answers()
    assert listening.reasons[0].startswith(
        "cannot accept connections: RuntimeError: can't start new thread; tried again"
    )


# The end


def test_listener_that_is_closed_ends_its_thread_and_reports_nothing(listening: Listening) -> None:
    before = set(threading.enumerate())
    listening.start()
    (thread,) = (
        each for each in set(threading.enumerate()) - before if each.name == "moe_ft-peers"
    )
    listening.listener.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not listening.reasons
    with pytest.raises(ConnectionRefusedError):
        stranger(listening.address)
