"""A job's store in this process, whose values are signed as those of a start."""

import torch.distributed as dist

from moe_ft.cluster.signed_store import SignedStore

TOKEN = "the token of the start"


def signed(store: dist.Store | None = None) -> SignedStore:
    """Return signed values in a store, by default a new one."""
    return SignedStore(dist.HashStore() if store is None else store, lambda: TOKEN)
