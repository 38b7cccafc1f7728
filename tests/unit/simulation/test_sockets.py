"""Simulated sockets: they behave as those of Linux do, in virtual time."""

import errno
import random
import socket

from tests.unit.simulation.simulated import Simulated
from tests.unit.simulation.talking import PORT, connect_to, connected, error_of

LARGE = random.Random(0).randbytes(1 << 20)

# Data


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


# Listening and closing


def test_backlog_is_bounded(simulated: Simulated) -> None:
    def connect() -> None:
        for _ in range(3):
            connect_to("node-a")
        simulated.say(type(error_of(lambda: connect_to("node-a"))))

    simulated.network.add_node("node-a")

    def serve() -> None:
        socket.create_server(("", PORT), backlog=2)
        simulated.kernel.sleep(100.0)

    simulated.process(serve, "node-a")
    simulated.process(connect, "node-b")
    simulated.run()
    assert simulated.said == [TimeoutError]


def test_port_is_taken_once(simulated: Simulated) -> None:
    def bind() -> None:
        first = socket.create_server(("node-a", 0))
        port = first.getsockname()[1]
        simulated.say(error_of(lambda: socket.create_server(("node-a", port))).errno)
        simulated.say(error_of(lambda: socket.create_server(("10.9.9.9", 0))).errno)
        first.close()
        socket.create_server(("node-a", port))

    simulated.process(bind)
    simulated.network.add_node("node-a")
    simulated.run()
    assert simulated.said == [errno.EADDRINUSE, errno.EADDRNOTAVAIL]
