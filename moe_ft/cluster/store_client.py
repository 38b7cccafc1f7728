"""Client of the job's store, with the operations of a store of torch, but without torch.

megatron/fault_tolerance/repair/store.py makes a store of torch of it, through which gloo and NCCL meet. The
server is store_server.py, and the messages are store_wire.py.
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from moe_ft.addresses import keep_alive
from moe_ft.calls import receive_all
from moe_ft.cluster.store_wire import (
    GREETING_BYTES,
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REPLY,
    Seal,
    StoreReply,
    StoreRequest,
    is_greeting,
    is_of_run,
    length_of,
    proof,
)
from moe_ft.errors import JobStoreError, RepairError
from moe_ft.files.progress import awaiting_others

_ANSWER_S = 30.0  # of a store that can be reached
_SLICE_S = 1.0  # of a wait: between two of them other threads use the connection
_AGAIN_S = 0.05  # after a server that has too many strangers
_NUM_PROOFS = 3  # of which one may meet a server that is too busy
_READ_BYTES = 1 << 16
_INFO_BYTES, _UNACKED_AT = 104, 24  # of struct tcp_info, and of its tcpi_unacked
# Linux repeats a message at even intervals: else it finds a link that is back as late as that was away.
_TCP_THIN_LINEAR_TIMEOUTS = 16

type Address = tuple[str, int]


class JobStore:
    """One connection to a job's store. Any thread may use it; one that waits delays others by a second."""

    def __init__(self, address: Address, run: str, token: str, prefix: str = "") -> None:
        """Connect.

        Args:
            run: name of the job's run.
            token: secret of the start.
            prefix: of all keys.

        Raises:
            RepairError: if the store is that of another job or start.
            OSError: if it does not answer.
        """
        self._where = "{}:{}".format(*address)
        self._prefix = prefix and f"{prefix}/"
        self._lock = threading.Lock()
        for number in range(_NUM_PROOFS):
            try:
                self._socket = self._prove(address, run, token.encode())
                return
            except ConnectionError as error:
                if number + 1 == _NUM_PROOFS:
                    raise RepairError(
                        f"the store at {self._where} is not the one of this start: another job has taken "
                        "the port, or knows another MOE_FT_KEEP_TOKEN"
                    ) from error

    def _prove(self, address: Address, run: str, token: bytes) -> socket.socket:
        """Return a connection on which both sides have proven the token; ConnectionError if one has not."""
        connection, greeted = _meet(address, run)
        try:
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(nonce + proof(token, b"client", greeted, nonce))
            theirs = receive_all(connection, PROOF_BYTES)
            if not hmac.compare_digest(theirs, proof(token, b"server", greeted, nonce)):
                raise ConnectionError("the token is wrong")
        except BaseException:
            connection.close()
            raise
        self._outgoing = Seal(token, b"client", greeted, nonce)
        self._incoming = Seal(token, b"server", greeted, nonce)
        return connection

    @awaiting_others()
    def _ask(self, request: StoreRequest) -> StoreReply:
        """Return the answer; raises JobStoreError if there is none."""
        with self._lock:
            try:
                self._socket.settimeout(request.wait_s + _ANSWER_S)
                self._socket.sendall(self._outgoing.seal(request))
                header = receive_all(self._socket, HEADER_BYTES)
                body = receive_all(self._socket, length_of(header))
                self._incoming.check(header, body)
            except BaseException as error:  # the next answer would be that to this request
                self._socket.close()
                if not isinstance(error, OSError):
                    raise
                raise JobStoreError(
                    f"the job's store at {self._where} does not answer: {error}"
                ) from error
        return REPLY.decode(body)

    def _key(self, key: str) -> str:
        return self._prefix + key

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(StoreRequest("set", [self._key(key)], _bytes(value)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 if it is not there, and return it."""
        return self._ask(StoreRequest("add", [self._key(key)], amount=amount)).number

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value."""
        self._ask(StoreRequest("append", [self._key(key)], _bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value in the place of an expected one, or of none; return what is there, as torch does."""
        request = StoreRequest("compare_set", [self._key(key)], _bytes(desired), _bytes(expected))
        return self._ask(request).value

    def rest(self, key: str, start: int) -> bytes:
        """Return a value from a byte on; nothing if it is not there."""
        return self._ask(StoreRequest("wait", [self._key(key)], start=start)).values[0] or b""

    def look(
        self, keys: Sequence[str], num_needed: int = 0, wait_s: float = 0.0
    ) -> Sequence[bytes | None]:
        """Return the values of some keys, once so many are there, or after so many seconds.

        Other threads cannot use this connection meanwhile.
        """
        names = [self._key(each) for each in keys]
        return self._ask(StoreRequest("wait", names, amount=num_needed, wait_s=wait_s)).values

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all values are there."""
        return None not in self.look(keys)

    def wait(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        """Return all values once they are there; None if they are not within so many seconds."""
        end_s = time.monotonic() + seconds
        while True:
            wait_s = min(_SLICE_S, max(0.0, end_s - time.monotonic()))
            found = [each for each in self.look(keys, len(keys), wait_s) if each is not None]
            if len(found) == len(keys):
                return found
            if time.monotonic() >= end_s:
                return None

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether it was there."""
        return bool(self._ask(StoreRequest("delete", [self._key(key)])).number)

    def knock(self) -> bool:
        """Return whether the kernel of the server's host has acknowledged the last knock; knock again then.

        It does that for a server that is stopped, too. Nobody reads the answers, so a connection with knocks
        has no other use. Does not wait; Linux alone has it. Raises OSError at the connection's end.
        """
        self._socket.setblocking(False)
        with suppress(BlockingIOError):  # nothing is there
            while self._socket.recv(_READ_BYTES):
                pass
            raise ConnectionError("the other side closed the connection")
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if any(info[_UNACKED_AT : _UNACKED_AT + 4]):
            return False
        self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_THIN_LINEAR_TIMEOUTS, 1)
        with suppress(BlockingIOError):  # a server that was stopped for long has no room
            self._socket.send(self._outgoing.seal(StoreRequest("count")))
        return True

    def num_keys(self) -> int:
        """Return the number of values of all starts."""
        return self._ask(StoreRequest("count")).number


@awaiting_others()
def _meet(address: Address, run: str) -> tuple[socket.socket, bytes]:
    """Return a connection to the store of a run, and its greeting.

    Raises:
        RepairError: if the store is that of another job.
        OSError: if it does not answer.
    """
    end_s = time.monotonic() + _ANSWER_S
    while True:
        connection = socket.create_connection(address, timeout=_ANSWER_S)
        try:
            keep_alive(connection)
            greeted = receive_all(connection, GREETING_BYTES)
            break
        except ConnectionError:  # it has too many strangers
            connection.close()
            if time.monotonic() > end_s:
                raise
            time.sleep(_AGAIN_S * (0.5 + secrets.randbelow(100) / 100))
        except BaseException:
            connection.close()
            raise
    if is_greeting(greeted) and is_of_run(greeted, run):
        return connection, greeted
    connection.close()
    what = "is of another job than" if is_greeting(greeted) else "is not one of moe_ft for"
    raise RepairError(
        f"the store at {address[0]}:{address[1]} {what} {run!r} (torchrun --rdzv-id): it had taken the port "
        "before"
    )


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
