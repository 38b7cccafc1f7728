"""Host memory that checkpoints take: the one place that says how many regions and slots there are.

Training reserves them (recovery/assembly.py, engine/memory.py), checks them (recovery/preflight.py), and
``python -m moe_ft plan`` prints them. Headers of files are left out: some KiB of each.
"""

from dataclasses import dataclass

from moe_ft.format.packings import Packing, pieces

NUM_REPLICA_REGIONS = 2


def num_regions(*, persists: bool) -> int:
    """Return how many regions a rank needs, each for a window of snapshots.

    One is the newest that is complete, one is being filled, one is being written to storage.
    """
    return 3 if persists else 2


def num_slots(num_units: int, most_in_snapshot: int) -> int:
    """Return how many slots a pool needs.

    They are for the newest version of each unit, those of the snapshot under way and, of the units that are
    being written to storage, the versions that are written; after a recovery for what the index that
    it rests on names in addition to the newest versions.
    """
    return num_units + 2 * most_in_snapshot if num_units else 0


def slot_bytes(num_elements: int, num_tensors: int) -> int:
    """Return what a slot has for a unit, whose version another start may have kept in any format.

    Args:
        num_elements: that the rank saves of the unit.
        num_tensors: fp32 tensors of as many elements: the master weights, the moments.
    """
    most = max(
        sum(piece.num_bytes for piece in pieces("F32", num_elements, packing))
        for packing in Packing
    )
    return num_tensors * most


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShare:
    """Host memory that the checkpoints of one rank take.

    Attributes:
        region_bytes: of one region: a window of snapshots, without what lies in the pool.
        pool_bytes: of the pool, 0 where every snapshot holds every unit.
    """

    region_bytes: int
    pool_bytes: int = 0

    def own_bytes(self, *, persists: bool) -> int:
        """Return what the rank itself keeps."""
        return num_regions(persists=persists) * self.region_bytes + self.pool_bytes

    @property
    def replica_bytes(self) -> int:
        """Bytes that one peer keeps for the rank."""
        return NUM_REPLICA_REGIONS * self.region_bytes + self.pool_bytes

    def total_bytes(self, *, persists: bool, replication_factor: int) -> int:
        """Return what a rank has on its node if every rank keeps as many replicas as it has peers."""
        return self.own_bytes(persists=persists) + replication_factor * self.replica_bytes
