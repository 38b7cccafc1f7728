"""A job's store in this process, whose values are signed as those of a start, and members that use it."""

from typing import Any

import torch.distributed as dist

from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.cluster.signed_store import SignedStore

TOKEN = "the token of the start"


def signed(store: dist.Store | None = None) -> SignedStore:
    """Return signed values in a store, by default a new one."""
    return SignedStore(dist.HashStore() if store is None else store, lambda: TOKEN)


def member_of(
    rank: int = 0, world_size: int = 1, store: dist.Store | None = None, **assigned: Any
) -> Member:
    """Return a member of a start with the token, which is connected to a store, by default a new one."""
    given = {"local_rank": 0, "node": "node", "token": TOKEN, **assigned}
    member = Member(Assignment(rank=rank, world_size=world_size, **given))
    member.connect(dist.HashStore() if store is None else store)
    return member
