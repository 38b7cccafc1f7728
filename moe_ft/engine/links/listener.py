"""Accepts connections, lets those in that know the token, and serves each in a thread of its own.

What is served is server.py; doctor serves its own conversation. No torch.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from moe_ft.addresses import keep_alive, listen
from moe_ft.engine.links.messages import challenge_client
from moe_ft.engine.links.transport import Connection, Deadline, TcpConnection

# Strangers get little: so many connections at a time, for so long. A peer needs milliseconds, and tries again
# for PROGRESS_TIMEOUT_S, in which those who hold all of them have lost them.
MAX_STRANGERS = 64
STRANGER_S = 3.0
_PAUSE_S = 0.5  # after a failure that is not of one connection, such as a lack of descriptors


class PeerListener:
    """Listens for the ranks of one start, until it is closed."""

    def __init__(
        self,
        host: str,
        serve: Callable[[Connection], None],
        report: Callable[[str], None],
    ) -> None:
        """Take what is called: `serve` with each peer that is let in, in a thread of its own.

        `report` is called by any thread with the reason when connections cannot be accepted.
        """
        self._host = host
        self._serve_peer = serve
        self._report = report
        self._token = ""
        self._listeners: Sequence[socket.socket] = ()
        self._is_closed = threading.Event()  # threads of an earlier start have their own
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)

    def start(self) -> int:
        """Listen; return the port. Raises OSError if that cannot be done."""
        self._is_closed = threading.Event()
        self._listeners = listen(self._host)
        for listener in self._listeners:
            args = (listener, self._is_closed)
            threading.Thread(
                target=self._accept, args=args, name="moe_ft-peers", daemon=True
            ).start()
        return int(self._listeners[0].getsockname()[1])

    def admit(self, token: str) -> None:
        """Let in whoever knows the token; before, nobody is."""
        self._token = token

    def close(self) -> None:
        """Stop listening."""
        self._is_closed.set()
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # closing alone frees no thread that accepts
            listener.close()
        self._listeners = ()

    def _accept(self, listener: socket.socket, is_closed: threading.Event) -> None:
        """Accept until `close`, whatever fails; of failures in a row the first one is reported."""
        is_failing = False
        while not is_closed.is_set():
            try:
                self._open(listener.accept()[0])
                is_failing = False
            except (OSError, RuntimeError) as error:  # RuntimeError: of a thread that cannot start
                if is_closed.is_set():
                    return
                if not is_failing:
                    self._report(
                        f"cannot accept connections: {type(error).__name__}: {error}; tried again "
                        f"every {_PAUSE_S} s, until then peers can neither send replicas nor read state"
                    )
                is_failing = True
                is_closed.wait(_PAUSE_S)

    def _open(self, accepted: socket.socket) -> None:
        keep_alive(accepted)
        connection = TcpConnection(accepted)
        if not self._strangers.acquire(blocking=False):
            connection.close()
            return
        name = "moe_ft-peer-connection"
        try:
            threading.Thread(target=self._run, args=(connection,), name=name, daemon=True).start()
        except RuntimeError:
            self._strangers.release()
            connection.close()
            raise

    def _run(self, connection: Connection) -> None:
        with closing(connection):
            try:
                is_peer = self._is_peer(connection)
            finally:
                self._strangers.release()
            if is_peer:
                self._serve_peer(connection)

    def _is_peer(self, connection: Connection) -> bool:
        if not self._token:
            return False
        try:
            challenge_client(connection, self._token, Deadline(STRANGER_S))
        except OSError:  # no failure of this rank: a peer reports it itself
            return False
        return True
