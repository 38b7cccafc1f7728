"""The network between simulated nodes: connections, and failures that a schedule chooses."""

import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.simulation.kernel import Process
from tests.unit.simulation.simulated import Simulated

LARGE = random.Random(0).randbytes(1 << 20)
PORT = 4000

Act = Callable[[socket.socket], Any]


def connected(simulated: Simulated, serve: Act, use: Act) -> tuple[Process, Process]:
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
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((node, PORT), timeout_s)


def error_of(act: Callable[[], Any]) -> OSError:
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


def test_sender_waits_until_the_other_side_reads(simulated: Simulated) -> None:
    def fill(connection: socket.socket) -> None:
        connection.settimeout(3.0)
        error = error_of(lambda: [connection.send(LARGE) for _ in range(1000)])
        simulated.say((type(error), str(error)))

    def read_late(connection: socket.socket) -> None:
        simulated.kernel.sleep(10.0)

    connected(simulated, read_late, fill)
    simulated.run()
    assert simulated.said == [(TimeoutError, "timed out")]
    assert 3.0 < simulated.trace[0][0] < 3.5


def test_connections_overtake_each_other() -> None:
    orders = set()
    for seed in range(20):
        with Simulated(seed) as simulated:

            def serve(simulated: Simulated = simulated) -> None:
                with socket.create_server(("", PORT)) as listener:
                    for _ in range(2):
                        connection = listener.accept()[0]
                        simulated.kernel.spawn(
                            simulated.world.process, lambda c=connection: simulated.say(c.recv(1))
                        )

            def use() -> None:
                both = [connect_to("node-a") for _ in range(2)]
                for number, connection in enumerate(both):
                    connection.send(b"%d" % number)

            simulated.network.add_node("node-a")
            simulated.process(serve, "node-a")
            simulated.process(use, "node-b")
            simulated.run()
            simulated.rest()
            orders.add(tuple(simulated.said))
    assert orders == {(b"0", b"1"), (b"1", b"0")}


def test_lost_node_is_silent(simulated: Simulated) -> None:
    def wait(connection: socket.socket) -> None:
        connection.settimeout(20.0)
        simulated.say(str(error_of(lambda: connection.recv(1))))

    _, lost = connected(simulated, wait, lambda connection: connection.recv(1))

    def lose() -> None:
        simulated.network.lose("node-b")
        simulated.kernel.kill(lost)

    simulated.later(1.0, lose)
    simulated.run()
    assert simulated.said == ["timed out"]


def test_partition_holds_back_what_is_sent(simulated: Simulated) -> None:
    def send(connection: socket.socket) -> None:
        simulated.network.partition(["node-a"], ["node-b"], 5.0, drop_probability=0)
        connection.send(b"x")
        error = error_of(lambda: socket.create_connection(("node-a", PORT), 2.0))
        simulated.say(type(error))

    def wait(connection: socket.socket) -> None:
        simulated.say(connection.recv(1))

    connected(simulated, wait, send)
    simulated.run()
    assert simulated.said == [TimeoutError, b"x"]
    assert 5.0 < simulated.trace[1][0] < 6.5


def test_one_bit_is_flipped(simulated: Simulated) -> None:
    def send(connection: socket.socket) -> None:
        simulated.network.corrupt_next("node-b", "node-a")
        connection.send(b'\0\0\0\x0c{"type":"Get"}')
        connection.send(bytes(1000))
        connection.send(bytes(1000))

    def compare(connection: socket.socket) -> None:
        content = read_all(connection)
        simulated.say((content[:18], sum(each.bit_count() for each in content[18:])))

    connected(simulated, compare, send)
    simulated.run()
    assert simulated.said == [(b'\0\0\0\x0c{"type":"Get"}', 1)]
