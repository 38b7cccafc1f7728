"""Serves the memory of this rank's node, and takes replicas for it. The other side is peers.py.

Connections of those that know the token are let in, and each is served in a thread of its own. What becomes
of replicas is replica_keeper.py.
"""

import mmap
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from moe_ft.engine.background import BackgroundPart, Reports
from moe_ft.engine.links.addresses import listen
from moe_ft.engine.links.authentication import challenge_client
from moe_ft.engine.links.messages import (
    REQUEST,
    Deadline,
    Get,
    Put,
    Reply,
    receive_header,
    send,
    send_all,
)
from moe_ft.engine.links.replica_keeper import ReplicaKeeper
from moe_ft.engine.memory.rank_memory import ReplicaMemory
from moe_ft.files.private_files import open_private
from moe_ft.format.encoding import check_path

# Strangers get little: so many connections at a time, for so long. A peer needs milliseconds, and tries again
# for PROGRESS_TIMEOUT_S, in which those who hold all of them have lost them.
MAX_STRANGERS = 64
STRANGER_S = 3.0
_PAUSE_S = 0.5  # after a failure that is not of one connection, such as a lack of descriptors
_IDLE_S, _PROBE_S, _NUM_PROBES = 60, 10, 6  # until a peer that is silent is known to be gone


class PeerListener:
    """Listens for the ranks of one start, until it is closed."""

    def __init__(
        self, host: str, serve: Callable[[socket.socket], None], report: Callable[[str], None]
    ) -> None:
        """Take what is done with connections.

        Args:
            host: the name or address of the interfaces.
            serve: called with each connection that is let in, in a thread of its own.
            report: called with the reason when connections cannot be accepted. Any thread.
        """
        self._host, self._serve_peer, self._report = host, serve, report
        self._token = ""
        self._listeners: list[socket.socket] = []
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
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._listeners = []

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

    def _open(self, connection: socket.socket) -> None:
        """Start the thread of a connection, or close it if there are too many strangers."""
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

    def _run(self, connection: socket.socket) -> None:
        with connection:
            try:
                is_peer = self._is_peer(connection)
            finally:
                self._strangers.release()
            if is_peer:
                self._serve_peer(connection)

    def _is_peer(self, connection: socket.socket) -> bool:
        """Return whether the other side knows the token."""
        if not self._token:
            return False
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge_client(connection, self._token, Deadline(STRANGER_S))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        except OSError:  # no failure of this rank: a peer reports it itself
            return False
        return True


class PeerServer:
    """Keeps replicas for other ranks and serves this node's memory directory."""

    def __init__(self, node_dir: Path, host: str) -> None:
        self._node_dir, self._host = node_dir, host
        self._keeper = ReplicaKeeper()
        self._listener = PeerListener(host, self._serve, self._report)
        self._lock = threading.Lock()
        self._reports: Reports | None = None
        self._unreported: list[str] = []  # until there are reports
        self.address: tuple[str, int] | None = None

    def start(self) -> None:
        """Listen on a free port of the host's interfaces; raises OSError if that cannot be done."""
        self.address = (self._host, self._listener.start())

    def admit(self, token: str) -> None:
        """Answer peers that know this token; before, nobody is answered."""
        self._listener.admit(token)

    def keep(self, replicas: Mapping[int, ReplicaMemory], reports: Reports) -> None:
        """Accept replicas of these ranks into this memory, which is open, and report failures from now on."""
        self._keeper.keep(replicas)
        with self._lock:
            self._reports = reports
            unreported, self._unreported = self._unreported, []
        for reason in unreported:
            self._report(reason)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _report(self, reason: str) -> None:
        with self._lock:
            if self._reports is None:
                self._unreported.append(reason)
            else:
                self._reports.degraded(BackgroundPart.PEER_SERVER, 0, reason)

    def _serve(self, connection: socket.socket) -> None:
        """Answer a peer's requests until it closes the connection or something is wrong with it."""
        try:
            while self._answer(connection):
                pass
        except Exception as error:  # the other side learns why, and this connection ends
            reply = Reply(error=f"{type(error).__name__}: {error}")
            with suppress(OSError):
                send(connection, reply, Deadline.for_bytes(0))

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request; return False if the connection is to end."""
        connection.settimeout(None)  # between requests a peer may be silent
        if not connection.recv(1, socket.MSG_PEEK):
            return False
        request = REQUEST.decode(receive_header(connection, Deadline.for_bytes(0)))
        if isinstance(request, Put):
            send(connection, self._keeper.receive(connection, request), Deadline.for_bytes(0))
        else:
            self._get(connection, request)
        return True

    def _get(self, connection: socket.socket, request: Get) -> None:
        try:
            check_path(request.path, "a request")
            with open_private(self._node_dir / request.path) as file:
                content = _range_of(file, request)
        except OSError as error:
            send(connection, Reply(error=str(error)), Deadline.for_bytes(0))
            return
        deadline = Deadline.for_bytes(len(content))
        send(connection, Reply(num_bytes=len(content)), deadline)
        send_all(connection, content, deadline)


def _range_of(file: BinaryIO, request: Get) -> memoryview:
    """Return what a request asks for of a file, as far as it exists."""
    end = os.fstat(file.fileno()).st_size
    if request.num_bytes >= 0:
        end = min(end, request.offset + request.num_bytes)
    if end <= request.offset:
        return memoryview(b"")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[request.offset : end]
