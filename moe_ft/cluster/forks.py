"""Ranks of a node, as its agent has its fork server run them, and the messages between the two.

The fork server (fork_server.py) is the agent's one child. It imports for seconds, and requests wait
meanwhile. If it ends, its ranks end with it; if it does not answer, it is killed. Then it is started again.

A message is one packet over a pair of sockets that no other process has. The agent asks for ranks, and has
them get signals. The fork server answers when it has imported what ranks need, and when a rank has ended that
it does not replace.
"""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.json import Decoder

from moe_ft.cluster.assignment import Assignment
from moe_ft.processes import follow_parent, is_stopped
from moe_ft.saying import warn

# Signals that ranks get too, if the agent gets them.
FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_MOST_BYTES = 1 << 16
_ASK_EVERY_S = 1.0
_ANSWER_S = 30.0
_IMPORT_S = 900.0
_LINE_S = 60.0  # between two lines about imports
_LONGEST_LOOK_S = 1.0
_MOST_IN_VAIN = 2  # fork servers in a row that end, or are killed, before they answer
KILLED = 128 + signal.SIGKILL
Role = Callable[[], None]


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


REQUEST: Decoder[Fork | Signal | Ask] = Decoder(Fork | Signal | Ask)
_ANSWER: Decoder[Ended | Answers] = Decoder(Ended | Answers)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the ends of the agent and of the fork server."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message; raises OSError if the other side has ended, or has not read for long."""
    connection.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)


def receive[Message](connection: socket.socket, decoder: Decoder[Message]) -> Message | None:
    """Return the next message; None if the other side has ended."""
    found = connection.recv(_MOST_BYTES)
    return decoder.decode(found) if found else None


@dataclass(eq=False, slots=True)
class _RunningRank:
    """A rank of this node; its exit code, as a shell has it, is None while it runs."""

    rank: int
    number: int
    code: int | None = None


class Forks:
    """The agent's end of the fork server. Single-threaded.

    Attributes:
        has_imported: whether the fork server has answered, so that ranks are forked at once.
        pid: of the last fork server; 0 before there is one.
    """

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        """Start nothing yet.

        Args:
            serve: is the fork server, in its process.
        """
        self._serve = serve
        self._ranks: list[_RunningRank] = []
        self._connection: socket.socket | None = None
        self.pid = self._num_requests = self._num_in_vain = 0
        self.has_imported = False

    @property
    def runs(self) -> bool:
        """True while a fork server runs."""
        return self._connection is not None

    def start(self) -> Role | None:
        """Fork the fork server; in its process, return what it is to do when it has left all frames.

        Raises:
            ConnectionError: if none has got as far as to answer, several times.
        """
        if self._num_in_vain >= _MOST_IN_VAIN:
            raise ConnectionError(f"{self._num_in_vain} of them have ended before they answered")
        ours, theirs = socket_pair()
        act, agent = partial(self._serve, theirs), os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            follow_parent(agent)
            ours.close()
            return act
        theirs.close()
        self._connection = ours
        self.has_imported = False
        self._looked_s = self._asked_s = time.monotonic()
        self._silent_s = self._said_s = 0.0
        self._num_in_vain += 1
        return None

    def run(self, assignment: Assignment, environment: dict[str, str]) -> None:
        """Have a rank forked; one that cannot be has ended with code 1."""
        self._num_requests += 1
        self._ranks.append(rank := _RunningRank(assignment.rank, self._num_requests))
        request = Fork(number=rank.number, assignment=assignment, environment=environment)
        if not self._send(request):
            rank.code = 1

    def pass_on(self, number: int) -> None:
        """Send a signal to all ranks that run; may be called by a handler of a signal."""
        if living := tuple(each.number for each in self._ranks if each.code is None):
            self._send(Signal(number, living))

    @property
    def has_ranks(self) -> bool:
        """True if there are ranks, also such as have ended."""
        return bool(self._ranks)

    @property
    def are_running(self) -> bool:
        """True while any rank runs."""
        return any(each.code is None for each in self._ranks)

    @property
    def code(self) -> int | None:
        """Worst exit code of the ranks once one has failed or all have ended; else None."""
        codes = [each.code for each in self._ranks if each.code is not None]
        have_ended = any(codes) or (bool(codes) and not self.are_running)
        return max(codes) if have_ended else None

    def end(self, ranks: Collection[int]) -> None:
        """Kill ranks that another node gets, and have them no more."""
        if ended := [each for each in self._ranks if each.rank in ranks]:
            self._send(Signal(signal.SIGKILL, tuple(each.number for each in ended)))
            self._ranks = [each for each in self._ranks if each not in ended]

    def forget(self) -> None:
        """Have no ranks any more: what still runs is killed, and means nothing."""
        self.pass_on(signal.SIGKILL)
        self._ranks.clear()

    def hear(self, timeout_s: float) -> None:
        """Take answers for a while, and end a fork server that gives none."""
        if self._connection is None:
            time.sleep(timeout_s)
            return
        while (
            self._connection is not None and select.select([self._connection], [], [], timeout_s)[0]
        ):
            self._take()
            timeout_s = 0.0
        if self._connection is not None:
            self._look()

    def _take(self) -> None:
        assert self._connection is not None
        try:
            answer = receive(self._connection, _ANSWER)
        except OSError:
            answer = None
        if answer is None:
            self._lose("has ended")
            return
        self._silent_s = 0.0
        self._num_in_vain = 0
        self.has_imported = True
        if isinstance(answer, Ended):
            code = os.waitstatus_to_exitcode(answer.status)
            for rank in self._ranks:
                if rank.number == answer.number:
                    rank.code = 128 - code if code < 0 else code

    def _look(self) -> None:
        """Ask the fork server for an answer, from time to time; kill it if it has given none for too long."""
        # A longer time between two looks means that this process did not run, and nothing about the other.
        now_s = time.monotonic()
        self._silent_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s
        limit_s = _ANSWER_S if self.has_imported or is_stopped(self.pid) else _IMPORT_S
        if self._silent_s > limit_s:
            self._lose(f"has not answered for {self._silent_s:.0f} s, and is killed")
        elif not self.has_imported:
            if self._silent_s - self._said_s > _LINE_S:
                self._said_s = self._silent_s
                warn(f"process {self.pid} has been importing for {self._silent_s:.0f} s")
        elif now_s - self._asked_s > _ASK_EVERY_S:
            self._asked_s = now_s
            self._send(Ask())

    def _send(self, request: msgspec.Struct) -> bool:
        """Send a request, if there is a fork server; its end is noticed by whoever hears it."""
        if self._connection is not None:
            with suppress(OSError):
                send(self._connection, request)
                return True
        return False

    def _lose(self, how: str) -> None:
        """Kill the fork server, and count its ranks as failed."""
        assert self._connection is not None
        warn(f"process {self.pid}, which forks ranks, {how}: its ranks end with it")
        self.close()
        for each in self._ranks:
            each.code = KILLED if each.code is None else each.code

    def close(self) -> None:
        """End the fork server, and with it all ranks."""
        if self._connection is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._connection.close()
            self._connection = None

    def drop(self) -> None:
        """Close in a forked process what belongs to the agent."""
        if self._connection is not None:
            self._connection.close()
