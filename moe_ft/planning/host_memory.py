"""Host memory of checkpoints: the one place that decides the numbers of regions and slots.

Training reserves them (recovery/assembly.py, engine/memory/rank_memory.py) and checks them
(recovery/job_memory.py), and ``python -m moe_ft plan`` prints them. Small files count with
upper bounds: headers, indexes, notes, and the pages that a file system gives to each.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from moe_ft.arithmetic import round_up
from moe_ft.config.config import MemoryConfig
from moe_ft.planning.parity import NUM_VERSIONS, smallest_group

NUM_GRADIENT_BUFFERS = 2  # of the snapshot that is being sent, and of the step that follows


_PAGE_BYTES = 4096
_IDENTITY_BYTES = 64 << 10
_RECORD_BYTES = 128 << 10  # mostly random states
_TENSOR_BYTES = 200  # its line in a header or an index
_COUNT_BYTES = 12  # of an expert's tokens


def index_bytes(num_tensors: int, *, window: int = 1, num_experts: int = 0) -> int:
    """Return the most bytes that the header and the index of a region take.

    A tensor is in both, and with its parameter; there may be an older version of it too, and its weights in
    each snapshot before the last.

    Args:
        num_tensors: of the rank's units at FULL.
        window: snapshots that a region may hold, each with a record.
        num_experts: of all MoE layers of the stage, which are counted.
    """
    tensors = num_tensors * (window + 6) * _TENSOR_BYTES
    counts = num_experts * (window + 6) * _COUNT_BYTES
    records = window * _RECORD_BYTES
    return round_up(_IDENTITY_BYTES + tensors + counts + records, _PAGE_BYTES)


def num_regions(*, persists: bool) -> int:
    """Return the regions that a rank needs, each for a window of snapshots.

    One is the newest that is complete, one is being filled, one is being written to storage.
    """
    return 3 if persists else 2


Regions = int | Fraction  # with parity a part of one, for all peers together


def regions_at_peers(memory: MemoryConfig, num_peers: int, num_nodes: int = 0) -> Regions:
    """Return the regions that a peer keeps of a rank with so many peers and without a pool.

    One is enough where others keep the newest state while one is filled (engine/links/sender.py). A replica
    by gradients is made of the one before.

    Args:
        num_nodes: of the job, which may leave groups that keep parity with fewer nodes; 0 for any number.
    """
    if (most := memory.parity_nodes) is not None:
        return Fraction(NUM_VERSIONS, smallest_group(num_nodes or most, most) - 1)
    return int(memory.replica_regions) if num_peers > 1 and not memory.sends_gradients else 2


def num_replica_regions(without_pool: Regions, *, has_pool: bool) -> Regions:
    """Return the regions that a peer keeps of a rank; one is the newest complete one, one is being filled.

    Where there is a pool they hold little: it takes 36 bytes of a parameter, or 18, and a region 0.3.

    Args:
        without_pool: see `regions_at_peers`.
    """
    return 2 if has_pool else without_pool


def num_slots(num_units: int, most_in_snapshot: int) -> int:
    """Return the slots that a pool needs.

    They hold the newest version of each unit, the versions of the snapshot in progress, and the versions that
    are being written to storage; after a recovery also those that only the recovered index names.
    """
    return num_units + 2 * most_in_snapshot if num_units else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShare:
    """Host memory that the checkpoints of one rank take.

    Attributes:
        region_bytes: of one region: a window of snapshots, without what lies in the pool.
        pool_bytes: of the pool, 0 where every snapshot holds every unit.
        breakpoint_bytes: of the rank's breakpoint, which no peer keeps; 0 without one.
        boundary_bytes: of the boundary log, 0 without one. Peers keep none of it.
        gradient_bytes: of the gradients of one step, 0 where peers get state. They lie in the process.
        index_bytes: of the header and the index of a region; see `index_bytes`.
    """

    region_bytes: int
    pool_bytes: int = 0
    breakpoint_bytes: int = 0
    boundary_bytes: int = 0
    gradient_bytes: int = 0
    index_bytes: int = 0

    def own_bytes(self, *, persists: bool) -> int:
        """Return the bytes that the rank keeps of its own state, and of what it sends."""
        regions = num_regions(persists=persists) * self.region_bytes
        sent = self.boundary_bytes + NUM_GRADIENT_BUFFERS * self.gradient_bytes
        return regions + self.pool_bytes + self.breakpoint_bytes + sent

    def replica_bytes(self, replica_regions: Regions) -> int:
        """Return the bytes that one peer keeps for the rank."""
        regions = self._num_replica_regions(replica_regions)
        return math.ceil(regions * self.region_bytes) + self.pool_bytes

    def _num_replica_regions(self, replica_regions: Regions) -> Regions:
        return num_replica_regions(replica_regions, has_pool=self.pool_bytes > 0)

    def num_covered(self, replication_factor: int, replica_regions: Regions) -> int:
        """Return the nodes whose loss at one time peers survive, whatever is on its way to them."""
        is_halved = self._num_replica_regions(replica_regions) == 1 < replication_factor
        return replication_factor // 2 if is_halved else replication_factor

    def beside_bytes(
        self, *, persists: bool, replication_factor: int, replica_regions: Regions
    ) -> int:
        """Return the bytes of the small files of a rank, and of those of the replicas that it keeps.

        The old index stays until the new one is whole. As much again is for notes and requests.
        """
        num_own = num_regions(persists=persists) + (3 if self.breakpoint_bytes else 2)
        regions = self._num_replica_regions(replica_regions)
        num_kept = math.ceil(replication_factor * (regions + 1))
        if isinstance(regions, Fraction) and replication_factor:  # indexes of all others of a group
            num_kept = (NUM_VERSIONS + 1) * math.ceil(NUM_VERSIONS / regions)
        return (num_own + num_kept) * self.index_bytes

    def total_bytes(
        self, *, persists: bool, replication_factor: int, replica_regions: Regions
    ) -> int:
        """Return the bytes of a rank on its node if every rank keeps as many replicas as it has peers.

        Args:
            replica_regions: see `num_replica_regions`.
        """
        kept = replication_factor * self.replica_bytes(replica_regions)
        beside = self.beside_bytes(
            persists=persists,
            replication_factor=replication_factor,
            replica_regions=replica_regions,
        )
        return self.own_bytes(persists=persists) + kept + beside


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Room that the checkpoints of a job take.

    Attributes:
        checkpoint_bytes: that all ranks write of a checkpoint.
        num_older: checkpoints that storage keeps besides: those whose files newer ones refer to, and the
            newest whole state.
    """

    share: MemoryShare
    checkpoint_bytes: int
    num_older: int = 0

    def num_stored(self, keep: int) -> int:
        """Return the most checkpoints on storage.

        Those that are kept, one that an earlier start has not read back, and the one that is written.
        """
        return keep + 2 + self.num_older
