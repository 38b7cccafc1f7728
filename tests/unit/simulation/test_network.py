"""The network between simulated nodes: ends of processes and nodes, failures, names."""

import errno
import socket

import pytest

from moe_ft.engine.links.addresses import listen, own_host
from tests.unit.simulation.simulated import Simulated
from tests.unit.simulation.talking import PORT, connected, error_of, read_all

# Ends of processes and nodes


def test_killed_process_ends_its_connections(simulated: Simulated) -> None:
    def send(connection: socket.socket) -> None:
        simulated.kernel.sleep(1.0)
        connection.send(b"x" * 1000)
        simulated.kernel.end(simulated.world.process)

    def receive_rest(connection: socket.socket) -> None:
        content = read_all(connection)
        simulated.say((len(content) in (0, 1000), type(error_of(lambda: send_twice(connection)))))

    def send_twice(connection: socket.socket) -> None:
        for _ in range(100):
            connection.send(b"x")
            simulated.kernel.sleep(0.1)

    connected(simulated, receive_rest, send)
    simulated.run()
    ((found_s, (is_whole, error)),) = simulated.trace
    assert is_whole
    assert error in (ConnectionResetError, BrokenPipeError)
    assert found_s < 3.0


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


def test_keepalive_finds_a_lost_node(simulated: Simulated) -> None:
    def wait(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
        simulated.say(error_of(lambda: connection.recv(1)).errno)

    _, lost = connected(simulated, wait, lambda connection: connection.recv(1))

    def lose() -> None:
        simulated.network.lose("node-b")
        simulated.kernel.kill(lost)

    simulated.later(100.0, lose)
    simulated.run()
    assert simulated.said == [errno.ETIMEDOUT]
    assert 219.0 < simulated.trace[0][0] < 221.0


def test_node_that_came_back_resets_who_waits_for_an_answer(simulated: Simulated) -> None:
    def ask(connection: socket.socket) -> None:
        connection.send(b"x")
        simulated.say(type(error_of(lambda: connection.recv(1))))

    _, lost = connected(simulated, ask, lambda _: simulated.kernel.sleep(100.0))

    def lose() -> None:
        simulated.network.lose("node-b")
        simulated.kernel.kill(lost)

    simulated.later(1.0, lose)
    simulated.later(10.0, lambda: simulated.network.restore("node-b"))
    simulated.run()
    assert simulated.said == [ConnectionResetError]
    assert 10.0 < simulated.trace[0][0] < 13.1


@pytest.mark.parametrize("seed", range(6))
def test_nobody_answers_for_a_lost_node(seed: int) -> None:
    with Simulated(seed) as simulated:
        simulated.network.add_node("node-a")
        simulated.network.lose("node-a")
        simulated.process(
            lambda: simulated.say(
                error_of(lambda: socket.create_connection(("node-a", PORT), 5.0))
            ),
            "node-b",
        )
        simulated.run()
        (error,) = simulated.said
        assert isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH


# Failures of the network


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


# Names


def test_master_whose_name_is_a_loopback_one_listens_everywhere(simulated: Simulated) -> None:
    simulated.network.add_node("node-a", has_loopback_name=True)

    def serve() -> None:
        host = own_host("node-a")
        (listener,) = listen(host)
        simulated.say((host, listener.getsockname()[0]))

    simulated.process(serve, "node-a")
    simulated.run()
    assert simulated.said == [("node-a", "0.0.0.0")]
