"""Connections of a round end once, and never those of a later round."""

import socket
from collections.abc import Iterator

import pytest

from megatron.fault_tolerance.repair.links import Links


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    return socket.create_connection(listener.getsockname()), listener.accept()[0]


def test_only_recorded_connections_end(listener: socket.socket) -> None:
    links = Links()
    outside = connect(listener)
    with links.recording():
        inside = connect(listener)
    assert links.end(0) == 2  # both ends are here
    assert inside[1].recv(1) == b""
    outside[0].sendall(b"x")
    assert outside[1].recv(1) == b"x"
    for each in (*outside, *inside):
        each.close()


def test_connections_that_are_made_after_the_end_of_their_round_end_at_once(
    listener: socket.socket,
) -> None:
    links = Links()
    links.begin(3)
    with links.recording():
        links.end(3)
        pair = connect(listener)
    assert pair[1].recv(1) == b""
    for each in pair:
        each.close()


def test_late_watcher_of_a_round_does_not_end_the_next_one(listener: socket.socket) -> None:
    links = Links()
    assert links.round == 0 and links.is_open
    links.end(0)
    assert not links.is_open
    links.begin(1)
    with links.recording():
        pair = connect(listener)
    assert links.end(0) == 0 and links.is_open
    assert links.end(1) == 2
    assert links.end(1) == 0, "once is enough"
    for each in pair:
        each.close()
