"""Server of the job's store: keeps values for processes that have proven the start's token, in one thread.

Strangers get little: so many connections at a time, for so long, with nothing stored for them. The oldest of
them goes when another one comes, so that those who fill the places do not keep a rank out for long. What is
said, and how a side proves itself, is store_wire.py.
"""

import asyncio
import hmac
import socket
import threading
from collections import defaultdict
from functools import partial
from typing import override

from msgspec.structs import replace

from moe_ft.addresses import keep_alive
from moe_ft.cluster.store_wire import (
    ANSWER_BYTES,
    HEADER_BYTES,
    NONCE_BYTES,
    REQUEST,
    Seal,
    StoreReply,
    StoreRequest,
    greeting,
    length_of,
    proof,
)

MAX_STRANGERS = 512
STRANGER_S = 3.0
_CROWDED_S = 0.5  # that a stranger has in any case: a rank needs milliseconds
_BACKLOG = 4096


class StoreServer:
    """Values by key, and who waits for them. All but `start` runs in the server's own thread.

    Attributes:
        values: by key.
    """

    def __init__(self, token: str, run: str) -> None:
        """Listen not yet.

        Args:
            token: secret of the start.
            run: name of the job's run, by which clients know another job's store.
        """
        self.token = token.encode()
        self.run = run
        self.values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, set[_Client]] = defaultdict(set)
        self._strangers: dict[_Client, float] = {}  # since when they are there, the oldest first

    def start(self, listener: socket.socket) -> None:
        """Serve those who connect, from now on until this process ends."""
        loop = asyncio.new_event_loop()
        serving = loop.create_server(lambda: _Client(self, loop), sock=listener, backlog=_BACKLOG)
        loop.run_until_complete(serving)
        threading.Thread(target=loop.run_forever, name="moe_ft-store", daemon=True).start()

    def admit(self, stranger: "_Client", now_s: float) -> bool:
        """Return whether a stranger may stay for now; another one may have to go for that."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest, since_s = next(iter(self._strangers.items()))
            if now_s - since_s < _CROWDED_S:
                return False
            oldest.end()
        self._strangers[stranger] = now_s
        return True

    def forget(self, stranger: "_Client") -> None:
        """Count a connection no more: it has proven itself, or is closed."""
        self._strangers.pop(stranger, None)

    def answer(self, client: "_Client", request: StoreRequest) -> None:
        """Do what a client asks for, and reply; it may have to wait."""
        values = self.values
        key = request.keys[0] if request.keys else ""
        if request.op == "wait":
            self._wait(client, request)
            return
        reply = StoreReply()
        if request.op == "count":
            reply = StoreReply(number=len(values))
        elif request.op == "delete":
            reply = StoreReply(number=int(values.pop(key, None) is not None))
        elif request.op == "add":
            number = int(values.get(key, b"0")) + request.amount
            values[key], reply = b"%d" % number, StoreReply(number=number)
        elif request.op == "append":
            values[key] = values.get(key, b"") + request.value
        elif request.op == "set":
            values[key] = request.value
        elif values.get(key, b"") == request.expected:  # as torch has it: empty means missing
            values[key] = request.value
            reply = StoreReply(value=request.value)
        else:
            reply = StoreReply(value=values.get(key, request.expected))
        client.reply(reply)
        if key in values:
            for each in self._waiting.pop(key, ()):
                self._wait(each, each.asked)

    def _wait(self, client: "_Client", request: StoreRequest | None) -> None:
        """Reply if enough values are there, or if the client does not wait; else wait for the others."""
        assert request is not None
        missing = [key for key in request.keys if key not in self.values]
        if len(request.keys) - len(missing) >= request.amount or request.wait_s <= 0:
            self.leave(client)
            found = [self.values.get(key) for key in request.keys]
            start = request.start
            client.reply(
                StoreReply(values=[each and each[start:] for each in found] if start else found)
            )
            return
        for key in missing:
            self._waiting[key].add(client)
        client.wait(request)

    def leave(self, client: "_Client") -> None:
        """Have a client wait no more."""
        request = client.stop_waiting()
        for key in () if request is None else request.keys:
            self._waiting[key].discard(client)
            if not self._waiting[key]:
                del self._waiting[key]


class _Client(asyncio.Protocol):
    """One connection: a stranger until its proof, and then a client with one request at a time."""

    def __init__(self, server: StoreServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._buffer = bytearray()
        self._greeted = greeting(server.run)
        self._incoming: Seal | None = None  # once it has proven itself
        self.asked: StoreRequest | None = None  # while it waits
        self._timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        keep_alive(transport.get_extra_info("socket"))
        if not self._server.admit(self, self._loop.time()):
            transport.abort()
            return
        self._timer = self._loop.call_later(STRANGER_S, self.end)
        transport.write(self._greeted)

    @override
    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            if self._incoming is None:
                self._meet()
                return
            while (request := self._next_request(self._incoming)) is not None:
                self._server.answer(self, request)
        except (ConnectionError, ValueError, IndexError):  # msgspec's errors are of ValueError
            self.end()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._server.forget(self)
        self._server.leave(self)

    def _meet(self) -> None:
        """Take the proof of a stranger, once all of it is there."""
        answer = bytes(self._buffer)
        if len(answer) < ANSWER_BYTES:
            return
        if len(answer) > ANSWER_BYTES:
            raise ConnectionError("nobody sends more before it has been answered")
        self._buffer.clear()
        token, nonce = self._server.token, answer[:NONCE_BYTES]
        expected = proof(token, b"client", self._greeted, nonce)
        if not hmac.compare_digest(answer[NONCE_BYTES:], expected):
            raise ConnectionError("the token is wrong: another job or an older start")
        self.stop_waiting()  # it has proven itself in time
        self._server.forget(self)
        self._incoming = Seal(token, b"client", self._greeted, nonce)
        self._outgoing = Seal(token, b"server", self._greeted, nonce)
        self._transport.write(proof(token, b"server", self._greeted, nonce))

    def _next_request(self, seal: Seal) -> StoreRequest | None:
        """Return the next request; None if it is not there yet."""
        if len(self._buffer) < HEADER_BYTES:
            return None
        header = bytes(self._buffer[:HEADER_BYTES])
        end = HEADER_BYTES + length_of(header)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        seal.check(header, body)
        if self.asked is not None:
            raise ConnectionError("a request before the answer to the last one")
        return REQUEST.decode(body)

    def reply(self, reply: StoreReply) -> None:
        """Answer the request."""
        self._transport.write(self._outgoing.seal(reply))

    def wait(self, request: StoreRequest) -> None:
        """Wait for values, at most as long as the request says in all."""
        if self.asked is None:
            give_up = partial(self._server.answer, self, replace(request, wait_s=0.0))
            self._timer = self._loop.call_later(request.wait_s, give_up)
        self.asked = request

    def stop_waiting(self) -> StoreRequest | None:
        """Wait no more, neither for values nor for a proof; return what asks for the values."""
        if self._timer is not None:
            self._timer.cancel()
        request, self.asked, self._timer = self.asked, None, None
        return request

    def end(self) -> None:
        """Close the connection at once."""
        self._server.forget(self)
        self._transport.abort()
