"""Several connections of a pair of ranks that carry one body together, for links faster than one of them.

A large body is cut into pieces, of which each stream takes the next one when it has sent its last: a slow
stream carries less. The head of a piece says which body it belongs to and where it goes. Each stream ends its
share of a body with an empty piece. A body has arrived when all shares have ended and the pieces cover it. A
stream that breaks ends all of them, which is reported when none of them writes to memory any more. With one
stream, and for bodies of one piece, bytes follow each other without any of this.
"""

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import override

from moe_ft.engine.links.messages import pass_over
from moe_ft.engine.links.transport import PROGRESS_TIMEOUT_S, Connection, Deadline

PIECE_BYTES = 8 << 20
_HEAD = struct.Struct(">QQQ")  # number of the body, place in it, and bytes

Target = memoryview | int  # a buffer, or a number of bytes that nobody wants


class Streams(Connection):
    """The connections of a pair; the first one carries everything but large bodies. Owned by one thread."""

    def __init__(self, *connections: Connection) -> None:
        self._all = [*connections]
        self._num_bodies = 0  # that several streams have carried, in either direction

    def add(self, others: Iterable[Connection]) -> None:
        """Carry large bodies over these too, which somebody else closes."""
        self._all += others

    def send_body(self, contents: Iterable[memoryview], num_bytes: int, deadline: Deadline) -> None:
        """Send contents, which have so many bytes together; raises OSError as `send` does, for any stream."""
        if self._is_plain(num_bytes):
            for content in contents:
                self.send(content, deadline)
            return
        pieces, lock, number = _pieces(contents), threading.Lock(), self._num_bodies

        def send_share(stream: Connection) -> None:
            piece = memoryview(b"x")
            while piece:
                with lock:
                    place, piece = next(pieces, (num_bytes, memoryview(b"")))
                stream.send(_HEAD.pack(number, place, len(piece)), deadline)
                stream.send(piece, deadline)

        self._together(send_share)

    def receive_body(self, targets: Iterable[Target], num_bytes: int, deadline: Deadline) -> None:
        """Fill targets, which have so many bytes together.

        Nothing is written to them any more when this ends, also with an error. Raises OSError as
        `receive_into` does, for any stream, and unless the pieces cover the targets.
        """
        if self._is_plain(num_bytes):
            for target in targets:
                _receive(self, target, deadline)
            return
        places = _Arrivals([*targets], self._num_bodies)
        self._together(lambda stream: places.receive_share(stream, deadline))
        places.check_are_full()

    def _is_plain(self, num_bytes: int) -> bool:
        is_plain = len(self._all) == 1 or num_bytes <= PIECE_BYTES
        self._num_bodies += not is_plain
        return is_plain

    def _together(self, act: Callable[[Connection], None]) -> None:
        """Act on all streams at once; after a failure end all, wait for all, and raise it."""
        errors: list[Exception] = []

        def run(stream: Connection) -> None:
            try:
                act(stream)
            except Exception as error:
                errors.append(error)
                self.end()

        threads = []
        for each in self._all[1:]:
            thread = threading.Thread(target=run, args=(each,), name="moe_ft-stream", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many threads
                errors.append(error)
                self.end()
                break
            threads.append(thread)
        run(self._all[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    @override
    def send(self, content: bytes | memoryview, deadline: Deadline) -> None:
        self._all[0].send(content, deadline)

    @override
    def receive_into(self, target: memoryview, deadline: Deadline) -> None:
        self._all[0].receive_into(target, deadline)

    @override
    def wait(self) -> bool:
        return self._all[0].wait()

    @override
    def end(self) -> None:
        for each in self._all:
            each.end()

    @override
    def close(self) -> None:
        for each in self._all:
            each.close()


def _pieces(contents: Iterable[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yield the pieces of a body with their places; none of them reaches into the next content."""
    place = 0
    for content in contents:
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            yield place, piece
            place += len(piece)


class _Arrivals:
    """Targets of a body, and which parts of them have arrived. Used by the threads of all streams."""

    def __init__(self, targets: list[Target], number: int) -> None:
        self._targets = targets
        self._number = number
        sizes = (each if isinstance(each, int) else len(each) for each in targets)
        self._starts = [*accumulate(sizes, initial=0)]
        self._arrived: dict[int, int] = {}  # bytes by place

    def receive_share(self, stream: Connection, deadline: Deadline) -> None:
        head = bytearray(_HEAD.size)
        while True:
            stream.receive_into(memoryview(head), deadline)
            number, place, num_bytes = _HEAD.unpack(head)
            if number == self._number and num_bytes == 0:
                return
            found = bisect_right(self._starts, place) - 1
            end = self._starts[found + 1] if found < len(self._targets) else 0
            if number != self._number or place + num_bytes > end:
                raise ConnectionError("a piece that does not belong to this body")
            target, start = self._targets[found], place - self._starts[found]
            part = num_bytes if isinstance(target, int) else target[start : start + num_bytes]
            _receive(stream, part, deadline)
            self._arrived[place] = num_bytes

    def check_are_full(self) -> None:
        """Raise ConnectionError unless every byte of the body has arrived once."""
        end = 0
        for place, num_bytes in sorted(self._arrived.items()):
            end = end + num_bytes if place == end else -1
        if end != self._starts[-1]:
            raise ConnectionError("pieces of a body are missing")


def _receive(stream: Connection, target: Target, deadline: Deadline) -> None:
    if isinstance(target, int):
        pass_over(stream, target, deadline)
    else:
        stream.receive_into(target, deadline)


class Loans:
    """Connections that wait for the first one of their pair. Used by the threads of all connections."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, list[Connection]] = {}
        self._taken: set[str] = set()

    def lend(self, pair: str, connection: Connection, confirm: Callable[[], None]) -> None:
        """Lend a connection; return when it is needed no more, or nobody has taken it in time.

        Args:
            confirm: is called when it can be taken.
        """
        with self._changed:
            self._waiting.setdefault(pair, []).append(connection)
        try:
            confirm()
            with self._changed:
                self._changed.wait_for(lambda: pair not in self._waiting, PROGRESS_TIMEOUT_S)
        finally:
            with self._changed:
                self._waiting.pop(pair, None)
                self._changed.wait_for(lambda: pair not in self._taken)

    @contextmanager
    def taken(self, pair: str) -> Iterator[list[Connection]]:
        """Take all connections of a pair, and give them back."""
        with self._changed:
            connections = self._waiting.pop(pair, [])
            self._taken.add(pair)
            self._changed.notify_all()
        try:
            yield connections
        finally:
            with self._changed:
                self._taken.remove(pair)
                self._changed.notify_all()
