"""Serves the memory of this rank's node, and takes replicas for it. The other side is peers.py.

listener.py lets connections in. What becomes of replicas is replica_keeper.py.
"""

import mmap
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from moe_ft.engine.background import BackgroundPart, Reports
from moe_ft.engine.links.listener import PeerListener
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
