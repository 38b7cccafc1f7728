"""Links of a round end once, never those of a later one; the ends of their connections free who waits."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from megatron.fault_tolerance.repair import gloo
from megatron.fault_tolerance.repair.gloo import Gloo, open_sockets, shut
from megatron.fault_tolerance.repair.links import Links
from moe_ft.cluster.member import Member
from tests.unit.signed import member_of

Connect = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Yield what makes a connection, of which it returns both ends."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

        def make() -> tuple[socket.socket, socket.socket]:
            one = opened.enter_context(socket.create_connection(listener.getsockname()))
            return one, opened.enter_context(listener.accept()[0])

        yield make


def test_only_recorded_connections_end(links: Links, connect: Connect) -> None:
    outside = connect()
    with links.recording():
        inside = connect()
    assert links.end(0) == 2  # both ends are here
    assert inside[1].recv(1) == b""
    outside[0].sendall(b"x")
    assert outside[1].recv(1) == b"x"


def test_connections_that_are_made_after_the_end_of_their_round_end_at_once(
    member: Member, links: Links, connect: Connect
) -> None:
    member.round = 3
    with links.recording():
        links.end(3)
        pair = connect()
    assert pair[1].recv(1) == b""


def test_late_watcher_of_a_round_does_not_end_the_next_one(
    member: Member, links: Links, connect: Connect
) -> None:
    assert links.is_open
    links.end(0)
    assert not links.is_open
    member.round = 1
    links.begin()
    with links.recording():
        connect()
    assert links.end(0) == 0 and links.is_open
    assert links.end(1) == 2
    assert links.end(1) == 0, "once is enough"


def pair_of_backends(timeout_s: float) -> list[Any]:
    """Return the two backends of a group, both in this process."""
    store, timeout = dist.HashStore(), timedelta(seconds=timeout_s)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, timeout), range(2)))


def outcome(wait: Callable[[], Any]) -> str:
    try:
        wait()
    except RuntimeError as error:
        return str(error)
    return ""


def send_and_end(num_elements: int) -> tuple[str, str]:
    """Send a message and end the connection at the same time; return what both ranks say of it."""
    links = Links(member_of(), (Gloo(),))
    with links.recording():
        sender, receiver = pair_of_backends(timeout_s=20)
    given, taken = torch.ones(num_elements), torch.zeros(num_elements)
    with ThreadPoolExecutor(2) as pool:
        # The receiver waits already: then nothing keeps the message back.
        receiving = pool.submit(outcome, receiver.recv([taken], 0, 0).wait)
        ending = pool.submit(links.end, 0)
        sent = outcome(lambda: sender.send([given], 1, 0).wait())
        assert ending.result(60) == 2
        received = receiving.result(60)
    links.begin()
    return sent, received


# No pause of the machine is as long as 200 looks, between two parts of a large message.
@pytest.mark.parametrize(
    ("num_messages", "num_elements", "quiet_looks"), [(2, 10_000_000, 200), (30, 100, 5)]
)
def test_nobody_waits_in_vain_for_a_message_whose_connection_ends_when_it_is_sent(
    num_messages: int, num_elements: int, quiet_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Gloo forgets a message that is cut, and one that it sends before it sees the end: both ranks wait on.
    monkeypatch.setattr(gloo, "_QUIET_LOOKS", quiet_looks)
    for _ in range(num_messages):
        assert not any("Timed out" in each for each in send_and_end(num_elements))


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
