"""Ends of connections: threads that wait for them are freed, other sockets are left alone."""

import socket
import threading

from megatron.fault_tolerance.repair.sockets import open_sockets, shut


def test_shut_connection_frees_a_blocked_reader_on_both_sides() -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with one, other:
            found: list[bytes] = []
            reader = threading.Thread(target=lambda: found.append(one.recv(1)))
            reader.start()
            mine = {fd: name for fd, name in open_sockets().items() if before.get(fd) != name}
            assert {one.fileno(), other.fileno(), listener.fileno()} == set(mine)
            assert shut({one.fileno(): mine[one.fileno()]}) == 1
            reader.join(120)
            assert found == [b""]
            assert other.recv(1) == b""
            assert shut({listener.fileno(): mine[listener.fileno()]}) == 0
            socket.create_connection(listener.getsockname()).close()  # it still listens


def test_descriptor_that_is_another_socket_now_is_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert shut({one.fileno(): "socket:[0]", 1 << 20: "socket:[1]"}) == 0
        assert shut(open_sockets()) == 0, "a Unix socket belongs to no group"
        one.sendall(b"x")
        assert other.recv(1) == b"x"
