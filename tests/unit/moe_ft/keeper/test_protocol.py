"""Requests and numbers arrive as they were sent, in whatever pieces; anything else is refused."""

import os
import socket
import struct
import threading

import pytest

from moe_ft.keeper.protocol import (
    RankRequest,
    receive_number,
    receive_request,
    send_number,
    send_request,
)

REQUEST = RankRequest(
    words=("-m", "module", "two words"),
    environment={"NAME": "value", "BYTES": os.fsdecode(b"\xff\xfe"), "LONG": "x" * 1_000_000},
    folder="/somewhere",
    mask=0o27,
    cpus=(0, 3),
)


def test_request_arrives_with_its_descriptors() -> None:
    one, other = socket.socketpair()
    reader, writer = os.pipe()
    with one, other:
        sender = threading.Thread(target=send_request, args=(one, REQUEST, (reader, writer, 2)))
        sender.start()
        found, streams = receive_request(other)
        sender.join()
    assert found == REQUEST
    os.close(writer)
    assert os.write(streams[1], b"through") == 7
    assert os.read(reader, 7) == b"through"
    for each in (*streams, reader):
        os.close(each)


@pytest.mark.parametrize("content", [b"", b"\0\0", struct.pack("!q", -1), struct.pack("!q", 10)])
def test_anything_else_is_refused_and_no_descriptor_is_left(content: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    one, other = socket.socketpair()
    with one, other:
        if content:
            socket.send_fds(one, [content], [0, 1])
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            receive_request(other)
    assert len(os.listdir("/proc/self/fd")) <= before  # other tests may have left some


def test_numbers_arrive_and_an_end_is_noticed() -> None:
    one, other = socket.socketpair()
    with other:
        with one:
            send_number(one, 0)
            send_number(one, 1 << 40)
        assert [receive_number(other), receive_number(other)] == [0, 1 << 40]
        with pytest.raises(ConnectionError, match="has closed the connection"):
            receive_number(other)
