"""Requests, answers and signals arrive as they were sent; anything else is refused."""

import os
import signal
import socket
from collections.abc import Sequence

import pytest

from moe_ft.cluster.protocol import (
    Answer,
    RankRequest,
    peer_pid,
    receive_answer,
    receive_request,
    receive_signal,
    send_answer,
    send_request,
    send_signal,
)

REQUEST = RankRequest(
    words=("-m", "module", "two words"),
    environment={"NAME": "value", "BYTES": os.fsdecode(b"\xff\xfe"), "LONG": "x" * 1_000_000},
    folder="/somewhere",
    mask=0o27,
    cpus=(0, 3),
)


def test_request_arrives_at_once_with_its_descriptors() -> None:
    one, other = socket.socketpair()
    other.setblocking(False)
    reader, writer = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    with one, other:
        send_request(one, REQUEST, (reader, writer, 2))
        found, streams = receive_request(other)
        assert len(os.listdir("/proc/self/fd")) == before + len(streams)
    assert found == REQUEST
    os.close(writer)
    assert os.write(streams[1], b"through") == 7
    assert os.read(reader, 7) == b"through"
    for each in (*streams, reader):
        os.close(each)


@pytest.mark.parametrize("descriptors", [None, [], [0, 1, 2], [0, 1, 2, 2, 2], "pipe", "empty"])
def test_anything_else_is_refused_and_no_descriptor_is_left(
    descriptors: Sequence[int] | str | None,
) -> None:
    reader, writer = os.pipe()
    empty = os.memfd_create("empty")
    before = len(os.listdir("/proc/self/fd"))
    one, other = socket.socketpair()
    with one, other:
        if isinstance(descriptors, str):
            descriptors = [reader if descriptors == "pipe" else empty, 0, 1, 2]
        if descriptors is not None:
            socket.send_fds(one, [b"\0"], list(descriptors))
        one.shutdown(socket.SHUT_WR)
        with pytest.raises((ConnectionError, ValueError)):
            receive_request(other)
    assert len(os.listdir("/proc/self/fd")) == before
    for each in (reader, writer, empty):
        os.close(each)


def test_answers_and_signals_arrive_and_an_end_is_noticed() -> None:
    one, other = socket.socketpair()
    with other:
        with one:
            send_answer(one, Answer.RUNS, 1 << 40)
            send_answer(one, Answer.ENDED, 9)
            send_signal(one, signal.SIGTERM)
        assert receive_answer(other) == (Answer.RUNS, 1 << 40)
        assert receive_answer(other) == (Answer.ENDED, 9)
        assert receive_signal(other) == signal.SIGTERM
        assert receive_signal(other) is None
        with pytest.raises(ConnectionError, match="closed the connection"):
            receive_answer(other)


def test_process_at_the_other_end_is_the_one_that_listens(tmp_path: object) -> None:
    path = f"{tmp_path}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        listener.listen()
        os.write(writer, b"r")
        signal.pause()
    assert os.read(reader, 1) == b"r"
    with listener, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        assert peer_pid(connection) == pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
