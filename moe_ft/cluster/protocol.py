"""Messages between a worker and the zygote of its node, on a Unix socket that only their user can open.

The worker sends one request: a byte, with the descriptors of a file that says what to run and of its standard
streams. The zygote can read that without waiting, so it waits for nobody. The worker then sends a byte for
each signal that the rank is to get. The zygote answers with the process of the rank, with that of each
replacement, and with the status of the last one as `wait` gives it. Either may close the connection: it has
ended.
"""

import json
import os
import signal
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

from moe_ft import saying
from moe_ft.calls import receive_all

IMPORTING = "moe_ft_imports"  # the name of the zygote's process until it answers

FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)

_ANSWER = struct.Struct("!Bq")
_PEER = struct.Struct("3i")  # Linux's struct ucred
_MOST_BYTES = 64 << 20
_NUM_STREAMS = 3


def say(line: str) -> None:
    """Print a line of the keeper for the people who watch the job."""
    saying.say(f"keep: {line}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRequest:
    """Facts that a new rank gets from the worker in whose place it runs."""

    words: tuple[str, ...]  # of its command line after `python`
    environment: dict[str, str]
    folder: str
    mask: int
    cpus: tuple[int, ...]  # a launcher may have bound the worker to some
    round: int = 0  # in which it takes the place of a rank whose node is lost; 0 if it does not
    died_s: float = 0.0  # time since 1970 when that node was heard last
    lost_node: str = ""


class Answer(IntEnum):
    """Answers of the zygote, each with a number."""

    UNUSABLE = 0  # no rank can be forked from it
    FAILED = 1  # this rank could not be forked; another one might
    RUNS = 2  # the number is that of the rank's process
    ENDED = 3  # the number is its status


def send_request(connection: socket.socket, request: RankRequest, streams: Sequence[int]) -> None:
    """Send a request with the descriptors of standard input, output and error."""
    with open(os.memfd_create("moe_ft_request"), "wb") as file:
        file.write(json.dumps(asdict(request)).encode())
        file.flush()
        socket.send_fds(connection, [b"\0"], [file.fileno(), *streams])


def receive_request(connection: socket.socket) -> tuple[RankRequest, list[int]]:
    """Return a request that has come, and the descriptors of streams, which the caller closes.

    Raises:
        ConnectionError: if the other end closed the connection, or sent something else.
    """
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1 + _NUM_STREAMS)
    try:
        if len(descriptors) != 1 + _NUM_STREAMS:
            raise ConnectionError("this is no request for a rank")
        values = json.loads(_content_of(descriptors[0]))
        values["words"], values["cpus"] = tuple(values["words"]), tuple(values["cpus"])
        request = RankRequest(**values)
    except BaseException:
        for each in descriptors:
            os.close(each)
        raise
    os.close(descriptors[0])
    return request, descriptors[1:]


def _content_of(descriptor: int) -> bytes:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
        raise ConnectionError("the request is not in a file, or too large")
    return os.pread(descriptor, found.st_size, 0)


def send_answer(connection: socket.socket, answer: Answer, number: int = 0) -> None:
    """Answer a worker."""
    connection.sendall(_ANSWER.pack(answer, number))


def receive_answer(connection: socket.socket) -> tuple[Answer, int]:
    """Return an answer and its number; raise ConnectionError if the connection was closed."""
    answer, number = _ANSWER.unpack(receive_all(connection, _ANSWER.size))
    return Answer(answer), number


def send_signal(connection: socket.socket, number: int) -> None:
    """Have the rank get a signal."""
    connection.sendall(bytes([number]))


def receive_signal(connection: socket.socket) -> int | None:
    """Return a signal for the rank; None if its worker has closed the connection."""
    try:
        found = connection.recv(1)
    except OSError:
        return None
    return found[0] if found else None


def peer_pid(connection: socket.socket) -> int:
    """Return the process that listened when this connection was made."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(found)[0])
