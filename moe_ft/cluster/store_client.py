"""Client of the job's store, in the form of a store of torch: gloo and NCCL meet through it too.

A store of torch that is written in Python needs neither a group nor a server of torch. The server is
store_server.py, and what is said to it store_wire.py.
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import override

import torch.distributed as dist

from moe_ft.addresses import keep_alive
from moe_ft.calls import receive_all
from moe_ft.cluster.store_wire import (
    GREETING_BYTES,
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    REPLY,
    TOKEN_BYTES,
    Reply,
    Request,
    Seal,
    asks_for_token,
    is_greeting,
    is_of_run,
    length_of,
    proof,
)
from moe_ft.errors import RepairError
from moe_ft.files.progress import awaiting_others

_ANSWER_S = 30.0  # of a store that can be reached
_SLICE_S = 1.0  # of a wait: between two of them other threads use the connection
_AGAIN_S = 0.05  # after a server that has too many strangers
_NUM_PROOFS = 3  # of which one may meet a server that is too busy

type Address = tuple[str, int]


class JobStore(dist.Store):
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
        super().__init__()
        self._where, self._prefix = "{}:{}".format(*address), prefix and f"{prefix}/"
        self._lock = threading.Lock()
        self.set_timeout(timedelta(seconds=_ANSWER_S))
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
    def _ask(self, request: Request) -> Reply:
        """Return the answer; raises DistNetworkError, as torch does, if there is none."""
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
                raise dist.DistNetworkError(
                    f"the job's store at {self._where} does not answer: {error}"
                ) from error
        return REPLY.decode(body)

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _wait(self, keys: Sequence[str], timeout: timedelta | None) -> bytes | None:
        """Return the first value when all are there; raises DistStoreError if they are not in time."""
        seconds = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        end_s, names = time.monotonic() + seconds, [self._key(each) for each in keys]
        while True:
            wait_s = min(_SLICE_S, max(0.0, end_s - time.monotonic()))
            reply = self._ask(Request("wait", names, wait_s=wait_s))
            if reply.number:
                return reply.value
            if time.monotonic() >= end_s:
                raise dist.DistStoreError(
                    f"{', '.join(keys)} not in the job's store within {seconds:.0f} s"
                )

    # As torch calls them: bytes where its callers give texts.

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Request("set", [self._key(key)], _bytes(value)))

    @override
    def get(self, key: str) -> bytes:
        return self._wait([key], None) or b""

    @override
    def add(self, key: str, amount: int) -> int:
        return self._ask(Request("add", [self._key(key)], amount=amount)).number

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value."""
        self._ask(Request("append", [self._key(key)], _bytes(value)))

    @override
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        request = Request("compare_set", [self._key(key)], _bytes(desired), _bytes(expected))
        return self._ask(request).value or b""

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Request("wait", [self._key(each) for each in keys])).number)

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout)

    @override
    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Request("delete", [self._key(key)])).number)

    @override
    def num_keys(self) -> int:
        return self._ask(Request("count")).number

    @override
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(each) for each in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Tell torch that it may use the two methods before."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 torch's names of them, from C++


def ask_for_token(address: Address, run: str, rank: int) -> str:
    """Return the token of a start for a rank that does not know it.

    Raises:
        RepairError: if it was given to another process of this rank, or the store is that of another job.
        OSError: if it does not answer.
    """
    connection, greeted = _meet(address, run)
    with connection:
        connection.sendall(asks_for_token(greeted, rank))
        try:
            return receive_all(connection, TOKEN_BYTES).decode()
        except ConnectionError as error:
            raise RepairError(
                f"the store at {address[0]}:{address[1]} has a rank {rank} already: it is of another job or "
                "another start, or a stranger was there first"
            ) from error


@awaiting_others()
def _meet(address: Address, run: str) -> tuple[socket.socket, bytes]:
    """Return a connection to the store of a run, and its greeting; raises as `ask_for_token` does."""
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
