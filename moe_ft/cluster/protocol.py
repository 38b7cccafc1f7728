"""Messages between the agent of a node and its fork server, over a pair of sockets that no other process has.

A message is one packet. The agent asks for ranks, and has them get signals. The fork server answers when it
has imported what ranks need, and when a rank has ended that it does not replace.
"""

import signal
import socket

import msgspec

from moe_ft.cluster.assignment import Assignment

# Signals that ranks get too, if the agent gets them.
FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_MOST_BYTES = 1 << 16


class Fork(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Request to fork a rank.

    Attributes:
        number: of this request, by which both sides know the rank.
        environment: variables that it has besides those of the fork server.
    """

    number: int
    assignment: Assignment
    environment: dict[str, str]


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Request to send a signal to ranks, by the numbers of their requests."""

    signal: int
    numbers: tuple[int, ...]


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Question whether the fork server still answers."""


class Ended(msgspec.Struct, tag=True, frozen=True):
    """End of a rank with the status that `wait` gives; also of one that could not be forked."""

    number: int
    status: int


class Answers(msgspec.Struct, tag=True, frozen=True):
    """Sign of life: after the imports, and whenever the agent asks."""


_REQUEST = msgspec.json.Decoder(Fork | Signal | Ask)
_ANSWER = msgspec.json.Decoder(Ended | Answers)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the ends of the agent and of the fork server."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message; raises OSError if the other side has ended, or has not read for long."""
    connection.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)


def receive_request(connection: socket.socket) -> Fork | Signal | Ask | None:
    """Return the next request; None if the agent has ended."""
    found = connection.recv(_MOST_BYTES)
    return _REQUEST.decode(found) if found else None


def receive_answer(connection: socket.socket) -> Ended | Answers | None:
    """Return the next answer; None if the fork server has ended."""
    found = connection.recv(_MOST_BYTES)
    return _ANSWER.decode(found) if found else None
