"""Strangers get little, and neither they nor failures end the listening."""

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from moe_ft.engine.links.server import PeerListener
from tests.unit.moe_ft.peer import DEADLINE_S, HOST, TOKEN, authenticated
from tests.waiting import wait_for

NUM_STRANGERS = 3


class Listening:
    """A listener that answers one word to whoever is let in."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.listener = PeerListener(HOST, lambda peer: peer.sendall(b"hi"), self.reasons.append)
        self.address = (HOST, 0)

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
    monkeypatch.setattr("moe_ft.engine.links.server.MAX_STRANGERS", NUM_STRANGERS)
    monkeypatch.setattr("moe_ft.engine.links.server._PAUSE_S", 0.01)
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


def test_peer_is_served(listening: Listening) -> None:
    listening.start()
    assert listening.answers()


def test_nobody_is_answered_before_there_is_a_token(listening: Listening) -> None:
    address = (HOST, listening.listener.start())
    with stranger(address) as connection:
        assert connection.recv(1) == b""


def test_strangers_beyond_the_most_are_closed_at_once(listening: Listening) -> None:
    listening.start()
    with ExitStack() as stack:
        for _ in range(NUM_STRANGERS):
            assert stack.enter_context(stranger(listening.address)).recv(1)  # the challenge
        assert stack.enter_context(stranger(listening.address)).recv(1) == b""


def test_peers_are_no_strangers_once_they_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.engine.links.server.MAX_STRANGERS", 1)
    with ExitStack() as stack:
        served = threading.Event()
        stack.callback(served.set)
        listener = PeerListener(HOST, lambda peer: bool(served.wait(DEADLINE_S)), lambda _: None)
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
    monkeypatch.setattr("moe_ft.engine.links.server.STRANGER_S", 0.2)
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

    monkeypatch.setattr("moe_ft.engine.links.server.listen", listen)
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


def test_listener_can_be_closed_twice_and_before_it_started(listening: Listening) -> None:
    listening.listener.close()
    listening.start()
    assert listening.answers()
    listening.listener.close()
    listening.listener.close()
