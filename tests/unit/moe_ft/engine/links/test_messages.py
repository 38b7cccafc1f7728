"""Messages between ranks over a real pair of sockets, and their deadlines."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from moe_ft.engine.links.messages import (
    REPLY,
    PeerReply,
    answer_challenge,
    challenge_client,
    pass_over,
    receive,
    receive_challenge,
    receive_header,
    send,
)
from moe_ft.engine.links.transport import Deadline, TcpConnection

Pair = tuple[TcpConnection, TcpConnection]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = map(TcpConnection, socket.socketpair())
    yield left, right
    left.close()
    right.close()


def far() -> Deadline:
    return Deadline(30.0)


def test_content_that_nobody_wants_is_passed_over(pair: Pair) -> None:
    pair[0].send(b"unwanted", far())
    send(pair[0], PeerReply(), far())
    pass_over(pair[1], len(b"unwanted"), far())
    assert REPLY.decode(receive_header(pair[1], far())) == PeerReply()


def test_connection_that_is_closed_in_the_middle_is_an_error(pair: Pair) -> None:
    pair[0].send(b"abc", far())
    pair[0].close()
    with pytest.raises(ConnectionError, match="closed"):
        receive(pair[1], 4, far())


def test_header_that_is_too_long_is_refused(pair: Pair) -> None:
    pair[0].send(struct.pack(">I", 1 << 30), far())
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


TOKEN, OTHER = "0123456789abcdef", "0123456789abcdee"
DEADLINE_S = 120.0
CHALLENGE_BYTES, ANSWER_BYTES, PROOF_BYTES = 40, 64, 32


class Sides:
    """A server and a client, with a wire between them that is read along."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4)
        server, self._server_end = socket.socketpair()
        client, self._client_end = socket.socketpair()
        self.server, self.client = TcpConnection(server), TcpConnection(client)
        self.said: list[bytes] = []
        ends = (self._server_end, self._client_end)
        for one, other in (ends, ends[::-1]):
            self._pool.submit(self._pass_on, one, other)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        while content := one.recv(1 << 10):
            self.said.append(content)
            other.sendall(content)
        other.shutdown(socket.SHUT_WR)

    def run(self, side: TcpConnection, act: Callable[[TcpConnection], None]) -> Future[None]:
        """Have one side act in a thread, and then close its connection."""

        def act_and_close() -> None:
            with closing(side):
                act(side)

        return self._pool.submit(act_and_close)

    def serve(self, token: str = TOKEN) -> Future[None]:
        """Have the server let in whoever knows a token."""
        return self.run(
            self.server, lambda side: challenge_client(side, token, Deadline(DEADLINE_S))
        )

    def enter(self, token: str = TOKEN) -> Future[None]:
        """Have the client prove a token."""

        def act(side: TcpConnection) -> None:
            deadline = Deadline(DEADLINE_S)
            answer_challenge(side, token, receive_challenge(side, deadline), deadline)

        return self.run(self.client, act)

    def close(self) -> None:
        """End the threads."""
        for side in (self.server, self.client, self._server_end, self._client_end):
            side.close()
        self._pool.shutdown()


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.close()


def test_token_is_not_shown_on_the_wire(sides: Sides) -> None:
    served, entered = sides.serve(), sides.enter()
    served.result(), entered.result()
    said = b"".join(sides.said)
    assert len(said) == CHALLENGE_BYTES + ANSWER_BYTES + PROOF_BYTES
    assert TOKEN.encode() not in said


@pytest.mark.parametrize("token", ["", OTHER, TOKEN[:-1], TOKEN.upper(), "töken", "x" * 10_000])
def test_client_with_a_wrong_token_is_refused_and_learns_it(sides: Sides, token: str) -> None:
    served, entered = sides.serve(), sides.enter(token)
    for side in (served, entered):
        with pytest.raises(ConnectionError, match="the token is wrong: another job or an older"):
            side.result()


def test_server_that_does_not_know_the_token_is_refused(sides: Sides) -> None:
    def pretend(side: TcpConnection) -> None:
        side.send(b"moe_ft/1" + bytes(32), Deadline(DEADLINE_S))
        receive(side, ANSWER_BYTES, Deadline(DEADLINE_S))
        side.send(bytes(PROOF_BYTES), Deadline(DEADLINE_S))

    sides.run(sides.server, pretend)
    with pytest.raises(ConnectionError, match="the token is wrong"):
        sides.enter().result()


def test_server_that_sends_the_clients_own_proof_back_is_refused(sides: Sides) -> None:
    def reflect(side: TcpConnection) -> None:
        side.send(b"moe_ft/1" + bytes(32), Deadline(DEADLINE_S))
        answer = receive(side, ANSWER_BYTES, Deadline(DEADLINE_S))
        side.send(bytes(answer[-PROOF_BYTES:]), Deadline(DEADLINE_S))

    sides.run(sides.server, reflect)
    with pytest.raises(ConnectionError, match="the token is wrong"):
        sides.enter().result()


def test_answer_to_another_challenge_is_refused(sides: Sides) -> None:
    first = Sides()
    first_served, first_entered = first.serve(), first.enter()
    first_served.result(), first_entered.result()
    first.close()
    (heard,) = [each for each in first.said if len(each) == ANSWER_BYTES]

    def repeat(side: TcpConnection) -> None:
        receive(side, CHALLENGE_BYTES, Deadline(DEADLINE_S))
        side.send(heard, Deadline(DEADLINE_S))

    sides.run(sides.client, repeat)
    with pytest.raises(ConnectionError, match="the token is wrong"):
        sides.serve().result()


def test_server_of_something_else_is_named_as_such(sides: Sides) -> None:
    sides.run(sides.server, lambda side: side.send(b"SSH-2.0-OpenSSH_9.6".ljust(40), far()))
    with pytest.raises(ConnectionError, match="what listens there is not a server of moe_ft/1"):
        sides.enter().result()


def test_client_that_sends_a_byte_now_and_then_is_given_up_in_total(sides: Sides) -> None:
    has_ended = threading.Event()

    def trickle(side: TcpConnection) -> None:
        while not has_ended.wait(0.02):
            side.send(b"x", far())

    sides.run(sides.client, trickle)
    try:
        with pytest.raises(TimeoutError):
            challenge_client(sides.server, TOKEN, Deadline(0.2))
    finally:
        has_ended.set()
