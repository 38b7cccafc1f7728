"""TCP as the transport of links. Addresses are addresses.py."""

import socket
from contextlib import suppress
from typing import override

from moe_ft.addresses import keep_alive, listen
from moe_ft.engine.links.transport import CHUNK_BYTES, Connection, Deadline, Listener, Transport


class TcpConnection(Connection):
    """A connection over one socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @override
    def send(self, content: bytes | memoryview, deadline: Deadline) -> None:
        rest = memoryview(content)
        while rest:
            self._socket.settimeout(deadline.step_s)
            rest = rest[self._socket.send(rest[:CHUNK_BYTES]) :]

    @override
    def receive_into(self, target: memoryview, deadline: Deadline) -> None:
        while target:
            self._socket.settimeout(deadline.step_s)
            count = self._socket.recv_into(target, min(len(target), CHUNK_BYTES))
            if count == 0:
                raise ConnectionError("the other side closed the connection")
            target = target[count:]

    @override
    def wait(self) -> bool:
        self._socket.settimeout(None)
        return bool(self._socket.recv(1, socket.MSG_PEEK))

    @override
    def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @override
    def close(self) -> None:
        self._socket.close()


class TcpListener(Listener):
    """A listening socket, which it owns."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = listener
        self.port = int(listener.getsockname()[1])

    @override
    def accept(self) -> TcpConnection:
        accepted = self._socket.accept()[0]
        keep_alive(accepted)
        return TcpConnection(accepted)

    @override
    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Tcp(Transport):
    """Sockets of the interfaces that a host's name leads to."""

    @override
    def listen(self, host: str) -> list[TcpListener]:
        return [TcpListener(each) for each in listen(host)]

    @override
    def connect(self, address: tuple[str, int], deadline: Deadline) -> TcpConnection:
        connection = socket.create_connection(address, deadline.rest_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return TcpConnection(connection)


TCP = Tcp()
