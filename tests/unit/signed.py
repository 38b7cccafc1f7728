"""A job's store in this process, whose values are signed as those of a start, and members that use it."""

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.cluster.signed_store import SignedStore

TOKEN = "the token of the start"


class LookedAt:
    """A store of torch, with what the job's store answers besides."""

    def __init__(self, store: Any = None) -> None:
        self._store = dist.HashStore() if store is None else store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def rest(self, key: str, start: int) -> bytes:
        """Return a value from a byte on."""
        return (self.look([key])[0] or b"")[start:]

    def look(
        self, keys: Sequence[str], num_needed: int = 0, wait_s: float = 0.0
    ) -> list[bytes | None]:
        """Return values once so many are there, or after so many seconds."""
        end_s = time.monotonic() + wait_s
        while True:
            found = [bytes(self._store.compare_set(key, "-", "-")) for key in keys]
            values = [None if each == b"-" else each for each in found]
            if len(keys) - values.count(None) >= num_needed or time.monotonic() >= end_s:
                return values
            time.sleep(0.001)


def signed(store: Any = None) -> SignedStore:
    """Return signed values in a store, by default a new one."""
    return SignedStore(LookedAt(store), lambda: TOKEN)


def member_of(rank: int = 0, world_size: int = 1, store: Any = None, **assigned: Any) -> Member:
    """Return a member of a start with the token, which is connected to a store, by default a new one."""
    given = {"local_rank": 0, "node": "node", "token": TOKEN, **assigned}
    member = Member(Assignment(rank=rank, world_size=world_size, **given))
    member.connect(LookedAt(store))
    return member
