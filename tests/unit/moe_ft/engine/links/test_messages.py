"""Messages between ranks over a real pair of sockets, and their deadlines."""

import socket
import struct
from collections.abc import Iterator

import pytest

from moe_ft.engine.links.messages import (
    REPLY,
    REQUEST,
    Deadline,
    Get,
    Put,
    Reply,
    pass_over,
    receive,
    receive_header,
    send,
    send_all,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def far() -> Deadline:
    return Deadline(30.0)


@pytest.mark.parametrize(
    "request_",
    [Put(3, 5, 10, 0, 100, ("layer.0.expert.1",), 7), Put(3, None, 0, 0, 0), Get("a/b", 4, -1)],
)
def test_request_arrives_as_it_was_sent(pair: Pair, request_: Put | Get) -> None:
    send(pair[0], request_, far())
    assert REQUEST.decode(receive_header(pair[1], far())) == request_


def test_content_that_nobody_wants_is_passed_over(pair: Pair) -> None:
    send_all(pair[0], b"unwanted", far())
    send(pair[0], Reply(), far())
    pass_over(pair[1], len(b"unwanted"), far())
    assert REPLY.decode(receive_header(pair[1], far())) == Reply()


def test_connection_that_is_closed_in_the_middle_is_an_error(pair: Pair) -> None:
    send_all(pair[0], b"abc", far())
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed"):
        receive(pair[1], 4, far())


def test_header_that_is_too_long_is_refused(pair: Pair) -> None:
    send_all(pair[0], struct.pack(">I", 1 << 30), far())
    with pytest.raises(ConnectionError, match="1073741824 bytes"):
        receive_header(pair[1], far())


def test_other_side_that_is_silent_is_given_up(pair: Pair) -> None:
    with pytest.raises(TimeoutError):
        receive(pair[1], 1, Deadline(30.0, silence_s=0.01))


def test_deadline_that_is_over_raises() -> None:
    deadline = Deadline(0.0)
    assert deadline.is_over
    with pytest.raises(TimeoutError, match=r"not done within 0\.0 s"):
        _ = deadline.rest_s
