"""Ends of connections: threads that wait for them are freed, and what others still send is taken."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron.fault_tolerance.repair import gloo
from megatron.fault_tolerance.repair.gloo import open_sockets, shut


def test_shut_connection_frees_a_blocked_reader_and_still_takes_what_the_other_end_sends() -> None:
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
            copies = shut({one.fileno(): mine[one.fileno()]})
            assert len(copies) == 1
            reader.join(120)
            assert found == [b""]
            one.close()  # as gloo does then
            for _ in range(10):
                other.sendall(b"nobody reads it, and it is no error")
            for copy in copies:
                copy.close()
            with pytest.raises(ConnectionError):
                while other.recv(1) == b"":
                    other.sendall(b"x")
            assert shut({listener.fileno(): mine[listener.fileno()]}) == []
            socket.create_connection(listener.getsockname()).close()  # it still listens


def test_descriptor_that_is_another_socket_now_is_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert shut({one.fileno(): "socket:[0]", 1 << 20: "socket:[1]"}) == []
        mine = {
            fd: name for fd, name in open_sockets().items() if fd in (one.fileno(), other.fileno())
        }
        assert len(mine) == 2 and shut(mine) == [], "a Unix socket belongs to no group"
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_descriptor_that_is_no_socket_any_more_is_left_alone_and_not_kept() -> None:
    reader, writer = os.pipe()
    assert shut({writer: "socket:[0]"}) == []
    os.close(writer)
    assert os.read(reader, 1) == b"", "nobody else can write"
    os.close(reader)


def test_connection_is_not_ended_while_bytes_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_QUIET_LOOKS", 100)  # no pause of the machine is as long
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with one, other:
            name = open_sockets()[one.fileno()]
            sent = 0

            def read() -> int:
                total = 0
                while data := one.recv(1 << 16):
                    total += len(data)
                return total

            with ThreadPoolExecutor(2) as pool:
                reading, ending = pool.submit(read), pool.submit(shut, {one.fileno(): name})
                for _ in range(100):
                    other.sendall(bytes(100))
                    sent += 100
                    time.sleep(0.001)
                assert not ending.done()
                assert reading.result(60) == sent
                (copy,) = ending.result(60)
                copy.close()


def test_bytes_that_nobody_reads_do_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_LONGEST_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        with one, other:
            other.sendall(b"x")
            (copy,) = shut({one.fileno(): open_sockets()[one.fileno()]})
            copy.close()
            assert one.recv(2) == b"x"
            assert one.recv(2) == b""
