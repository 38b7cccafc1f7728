"""Values in a store of torch that count only if written with the token of a start, and meetings there.

A TCPStore lets in whoever reaches its port. So each value carries a code that only the token makes of its key
and its bytes (HMAC-SHA256, RFC 2104), and nothing is parsed before that code is checked. A value is JSON. One
that is too long, not signed, or signed for another key or start reads as one that is not there; this is said
once. A stranger can still overwrite and delete: a value is missing then, never wrong.

In a meeting each rank says something, and learns what the others have said, also when the groups are broken.
The store is one process: the more ranks ask it, the less often each of them does. No torch.
"""

import hmac
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from moe_ft.errors import RepairError
from moe_ft.files.progress import awaiting_others, call_within
from moe_ft.saying import warn

MAX_VALUE_BYTES = 4 << 20  # torch's server takes 8 MiB
_MAX_LIST_BYTES = 64 << 20
_CODE_BYTES = 64  # in hexadecimal
_MAX_OPERATIONS_PER_S = 5000  # of all ranks together
_MOST_STRANGERS = 100  # values in a row that are none of ours
_ABSENT = b"-"  # is no signed value, and not empty: torch would store it then


class SignedStore:
    """One connection's view of the signed values. Any thread may use it.

    A key holds either a value or a list that processes append to. A value is not None. Each key of a value is
    written once, or always with the same value: an older one that a stranger writes again is then no lie.
    """

    def __init__(
        self,
        store: Any,
        token: Callable[[], str],
        tell: Callable[[str, str], None] | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            store: torch's; nothing else may use the keys that this one uses.
            token: returns the secret that the processes share. As long as it is empty, nothing is there.
            tell: is called with a key whose value is ignored and the reason, once for each key. By default it
                prints a line; it may raise instead.
        """
        self._store = store
        self._token = token
        self._tell = tell or _tell
        self._told: set[str] = set()

    def close(self) -> None:
        """Close the connection."""
        self._store.close()

    def set(self, key: str, value: Any) -> None:
        """Write a value that JSON can carry; raises RepairError if it is too long."""
        self._store.set(key, self._signed(key, value))

    def set_first(self, key: str, value: Any) -> Any:
        """Write a value unless one is there, and return the one that is there then. One step for all."""
        signed = self._signed(key, value)
        there = bytes(self._store.compare_set(key, "", signed))
        for _ in range(_MOST_STRANGERS):
            if (found := self._checked(key, there)) is not None:
                return found
            # A stranger's value is replaced like one that is missing: by the first who finds it.
            there = bytes(self._store.compare_set(key, there, signed))
        raise RepairError(f"a stranger writes {key} in the job's store again and again")

    def get(self, key: str) -> Any:
        """Return a value; None if it is not there. Does not wait."""
        raw = self._read(key, MAX_VALUE_BYTES)
        return None if raw is None else self._checked(key, raw)

    def look(self, keys: Sequence[str], wait_s: float) -> list[Any]:
        """Return some values, None where there is none, once one is there or after so many seconds.

        Of the job's store alone: its server answers when the value is written.
        """
        if not self._token():
            return [None] * len(keys)
        found = zip(keys, self._store.look(keys, 1, wait_s), strict=True)
        return [None if raw is None else self._checked(key, raw) for key, raw in found]

    def add(self, key: str, value: Any) -> None:
        """Add a value to a list whose `length` nobody asks for; raises as `set` does."""
        # What a stranger has appended without the end of a line is a line of its own.
        self._store.append(key, "\n" + self._signed(key, value) + "\n")

    def append(self, key: str, value: Any) -> int:
        """Add a value to a list, and return its `length`; raises as `set` does."""
        self.add(key, value)
        return int(self._store.add(_counter(key), 1))

    def length(self, key: str) -> int:
        """Return what the counter of a list says. It costs less than the list, and anybody can change it."""
        return int(self._store.add(_counter(key), 0))

    def values(self, key: str) -> list[Any]:
        """Return the values of a list. Does not wait."""
        return self._checked_lines(key, self._read(key, _MAX_LIST_BYTES) or b"")

    def more_values(self, key: str, start: int) -> tuple[list[Any], int]:
        """Return the values of a list from a byte on, and the byte after them. Of the job's store alone."""
        raw = self._store.rest(key, start) if self._token() and start < _MAX_LIST_BYTES else b""
        return self._checked_lines(key, raw), start + len(raw)

    def _checked_lines(self, key: str, lines: bytes) -> list[Any]:
        found = (self._checked(key, line) for line in lines.split(b"\n") if line)
        return [value for value in found if value is not None]

    def _read(self, key: str, max_bytes: int) -> bytes | None:
        if not self._token():
            return None
        # torch's `get` waits for a key that is missing. This changes nothing, and answers at once.
        raw = bytes(self._store.compare_set(key, _ABSENT.decode(), _ABSENT.decode()))
        if raw == _ABSENT:
            return None
        if len(raw) > max_bytes:
            self._ignore(key, f"it has {len(raw)} bytes, and {max_bytes} are the most")
            return None
        return raw

    def _signed(self, key: str, value: Any) -> str:
        body = json.dumps(value, allow_nan=False, separators=(",", ":"))
        line = f"{self._code(key, body.encode())} {body}"
        if len(line) > MAX_VALUE_BYTES:
            raise RepairError(
                f"{key} would have {len(line)} bytes in the job's store; the limit is {MAX_VALUE_BYTES}"
            )
        return line

    def _checked(self, key: str, line: bytes) -> Any:
        code, body = line[:_CODE_BYTES], line[_CODE_BYTES + 1 :]
        if len(line) > MAX_VALUE_BYTES or not hmac.compare_digest(
            code, self._code(key, body).encode()
        ):
            self._ignore(key, "it is not signed with the token of this start")
            return None
        return json.loads(body)

    def _code(self, key: str, body: bytes) -> str:
        return hmac.digest(self._token().encode(), f"{key}\n".encode() + body, "sha256").hex()

    def _ignore(self, key: str, reason: str) -> None:
        if key not in self._told:
            self._tell(key, reason)
            self._told.add(key)


def _tell(key: str, reason: str) -> None:
    warn(f"a value of {key} in the job's store is ignored: {reason}")


def _counter(key: str) -> str:
    return f"{key}/count"


def poll_s(world_size: int, least_s: float) -> float:
    """Return the seconds between two looks of a rank at the store."""
    return max(least_s, world_size / _MAX_OPERATIONS_PER_S)


class StoreMeeting:
    """One rank's part in meetings of all ranks. Used by one thread at a time."""

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        world_size: int,
        *,
        least_poll_s: float,
        answer_s: float | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            answer_s: seconds that the store has for each answer; None to wait as long as it takes. An
                operation can block for minutes when the store's host is gone.
        """
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self.poll_s = poll_s(world_size, least_poll_s)
        self._answer_s = answer_s

    def ask[Answer](self, ask: Callable[[SignedStore], Answer]) -> Answer:
        """Return what the store answers; raises OSError or RuntimeError if it does not, or not in time."""
        if self._answer_s is None:
            return ask(self._store)
        return call_within(lambda: ask(self._store), self._answer_s, "the job's store")

    @awaiting_others()
    def exchange(
        self, key: str, value: Any, seconds: float, gives_up: Callable[[float], bool]
    ) -> dict[int, Any] | None:
        """Say something in a list, and return what has been said there, by rank: by all, or by then.

        Returns None if it gave up; raises as `ask` does.

        Args:
            seconds: after which this waits for nobody any more.
            gives_up: waits for so many seconds; returns whether there is nothing more to wait for.
        """
        end_s = time.monotonic() + seconds
        num_said = self.ask(lambda store: store.append(key, [self._rank, value]))
        while True:
            is_last = time.monotonic() >= end_s
            if is_last or num_said >= self._world_size:
                said = self.said(key)
                if is_last or len(said) == self._world_size:
                    return said
            if gives_up(self.poll_s):
                return None
            num_said = self.ask(lambda store: store.length(key))

    def said(self, key: str) -> dict[int, Any]:
        """Return what ranks have said in a list so far. Raises as `ask` does."""
        return self.ask(lambda store: dict(store.values(key)))
