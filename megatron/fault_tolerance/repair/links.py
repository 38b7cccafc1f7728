"""Connections of the process groups of one round, which end together when a rank has died.

`ProcessGroupGloo.abort` frees nobody: a thread that waits for a healthy rank waits on. The end of its
connections does.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.fault_tolerance.repair.sockets import open_sockets, shut


class Links:
    """The connections of the present round. Any thread may end them, once, and only those of its round."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = 0
        self._sockets: dict[int, str] = {}
        self._is_open = True

    @property
    def round(self) -> int:
        """Number of the round."""
        return self._round

    @property
    def is_open(self) -> bool:
        """True until the connections have been ended."""
        return self._is_open

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add the connections that are made in this context: those of groups.

        They are ended at once if those of the round have been ended meanwhile.
        """
        before = open_sockets()
        yield
        made = {fd: name for fd, name in open_sockets().items() if before.get(fd) != name}
        with self._lock:
            self._sockets |= made
            if not self._is_open:
                shut(made)

    def begin(self, number: int) -> None:
        """Begin a round, without connections."""
        with self._lock:
            self._round, self._sockets, self._is_open = number, {}, True

    def end(self, number: int) -> int:
        """End the connections of a round, unless they have ended or another round has begun.

        Returns:
            Their number.
        """
        with self._lock:
            if number != self._round or not self._is_open:
                return 0
            self._is_open = False
            return shut(self._sockets)
