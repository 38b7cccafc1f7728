"""Simulated sockets: they behave as those of Linux do, in virtual time."""

import errno
import random
import socket

import pytest

from moe_ft.engine.links.messages import Deadline, receive, send_all
from tests.unit.simulation.simulated import Simulated
from tests.unit.simulation.talking import PORT, connect_to, connected, error_of, read_all

LARGE = random.Random(0).randbytes(1 << 20)

# Data


@pytest.mark.parametrize("seed", range(10))
def test_megabyte_goes_both_ways_in_pieces(seed: int) -> None:
    with Simulated(seed) as simulated:

        def answer(connection: socket.socket) -> None:
            connection.settimeout(5.0)
            send_all(
                connection, bytes(receive(connection, len(LARGE), Deadline(60.0))), Deadline(60.0)
            )

        def ask(connection: socket.socket) -> None:
            count = connection.send(LARGE)
            assert 0 < count < len(LARGE)
            send_all(connection, LARGE[count:], Deadline(60.0))
            simulated.say(receive(connection, len(LARGE), Deadline(60.0)) == LARGE)

        connected(simulated, answer, ask)
        simulated.run()
        assert simulated.said == [True]


def test_peeking_leaves_what_arrived(simulated: Simulated) -> None:
    def peek(connection: socket.socket) -> None:
        simulated.say((connection.recv(1, socket.MSG_PEEK), connection.recv(1), connection.recv(1)))

    connected(simulated, peek, lambda connection: connection.sendall(b"ab"))
    simulated.run()
    assert simulated.said == [(b"a", b"a", b"b")]


def test_end_follows_the_data(simulated: Simulated) -> None:
    connected(
        simulated,
        lambda connection: simulated.say(read_all(connection) == LARGE),
        lambda connection: send_all(connection, LARGE, Deadline(60.0)),
    )
    simulated.run()
    assert simulated.said == [True]


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


def test_listener_that_is_shut_down_lets_go_of_who_waits(simulated: Simulated) -> None:
    def serve() -> None:
        listener = socket.create_server(("", PORT))
        process = simulated.world.process
        simulated.kernel.spawn(process, lambda: simulated.say(error_of(listener.accept).errno))
        simulated.kernel.sleep(1.0)
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        socket.create_server(("", PORT))

    simulated.process(serve)
    simulated.run()
    simulated.rest()
    assert simulated.said == [errno.EINVAL]


def test_thread_stays_in_a_socket_that_another_one_closes(simulated: Simulated) -> None:
    def wait(connection: socket.socket) -> None:
        connection.settimeout(5.0)
        simulated.kernel.call_later(1.0, lambda: simulated.kernel.spawn(process, connection.close))
        process = simulated.world.process
        simulated.say(error_of(lambda: connection.recv(1)).errno)

    connected(simulated, wait, lambda connection: simulated.say(connection.recv(1)))
    simulated.run()
    assert sorted(map(str, simulated.said)) == [str(errno.EBADF), "b''"]
    assert min(simulated.trace)[0] >= 5.0


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


def test_sockets_outside_are_real(simulated: Simulated) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert isinstance(listener, socket.socket)
        with socket.create_connection(listener.getsockname()) as connection:
            connection.send(b"x")
            assert listener.accept()[0].recv(1) == b"x"
