"""Pairs of simulated processes that talk over a connection."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.simulation.kernel import Process
from tests.unit.simulation.simulated import Simulated

PORT = 4000

Act = Callable[[socket.socket], Any]


def connected(simulated: Simulated, serve: Act, use: Act) -> tuple[Process, Process]:
    """Return two processes that have a connection: the one on node-a accepts it."""
    simulated.network.add_node("node-a")
    simulated.network.add_node("node-b")

    def accept() -> None:
        with socket.create_server(("node-a", PORT)) as listener:
            connection = listener.accept()[0]
        with connection:
            serve(connection)

    def connect() -> None:
        with connect_to("node-a") as connection:
            connection.settimeout(None)
            use(connection)

    return simulated.process(accept, "node-a"), simulated.process(connect, "node-b")


def connect_to(node: str, timeout_s: float = 10.0) -> socket.socket:
    """Connect as soon as somebody listens."""
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((node, PORT), timeout_s)


def error_of(act: Callable[[], Any]) -> OSError:
    """Return the error that something ends with."""
    with pytest.raises(OSError) as caught:
        act()
    return caught.value


def read_all(connection: socket.socket) -> bytes:
    """Return everything up to the end, or to a failure."""
    content = b""
    with suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            content += more
    return content
