"""Tiers: the kinds of places that keep state, as the rank sees them that reads it. Pure.

A tier is a value here, and a finder and a reader in recovery/media.py. Its writer is a part of the engine:
engine/snapshots for the memory of a node, engine/links for that of peers, engine/persist for storage.
"""

from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True, slots=True)
class Tier:
    """Kind of place of state.

    Attributes:
        name: in events and messages.
        preference: of several tiers that of the least is read first.
        from_afar: the same place as ranks of other nodes than its own see it; None for the same tier.
    """

    name: str
    preference: int
    from_afar: Optional["Tier"] = None


PEER = Tier("peer", 20)  # host memory of another node
MEMORY = Tier("memory", 0, from_afar=PEER)  # host memory of its own node
STORAGE = Tier("storage", 40)
