"""A rank's share of its node's memory: its regions, pool and boundary log, and the replicas that it keeps.

engine/snapshots/windows.py decides what goes in.
"""

import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ft.config.fields import size_text
from moe_ft.engine.memory.job_directory import (
    own_directory,
    rank_and_holder,
    remove_node,
    replica_directory,
)
from moe_ft.engine.memory.mappings import Mappings
from moe_ft.engine.memory.parity import PARITY_NAME, ParityFile, ParityStore, parity_files
from moe_ft.engine.memory.regions import (
    BOUNDARY_FILE_NAME,
    BoundarySlot,
    IndexedFile,
    MappedFile,
    Region,
    UnitPool,
    breakpoint_region,
)
from moe_ft.files.private_files import read_private
from moe_ft.files.progress import SLOWEST_BYTES_PER_S, waiting
from moe_ft.format.encoding import decode
from moe_ft.format.identity import Start
from moe_ft.format.index import IndexHead
from moe_ft.planning.host_memory import Regions, num_regions, num_replica_regions
from moe_ft.planning.parity import ParityGroup
from moe_ft.topology import RankInfo, Topology

_REGION = re.compile(r"region_(\d+)\.safetensors")
_OURS = re.compile(
    r"((region_\d+|breakpoint(_\d+)?)\.(safetensors|json))|(pool_\d+x\d+\.safetensors)"
    rf"|{BOUNDARY_FILE_NAME.pattern}|{PARITY_NAME}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaMemory:
    """Memory for the replicas of one rank: regions, and a pool if that rank has one."""

    regions: tuple[Region, ...]
    pool: UnitPool | None


class RankMemory:
    """Memory of one rank. The training thread opens and closes it; each part states who fills it.

    Attributes:
        regions, pool: of this rank; no pool where every snapshot holds every unit.
        replicas: by the rank whose state they hold.
        parity: versions of parity of the group; none where there are replicas.
    """

    def __init__(
        self,
        node_dir: Path,
        rank: int,
        topology: Topology,
        sources: Sequence[int],
        *,
        persists: bool,
        replica_regions: Regions = 2,
        parity: ParityGroup | None = None,
    ) -> None:
        self.node_dir = node_dir
        self.rank = rank
        self._topology = topology
        own = topology.ranks[rank]
        self._node = own.node
        self.regions = _regions(own_directory(node_dir, rank), num_regions(persists=persists), own)
        self.pool = _pool(own_directory(node_dir, rank), own)
        self.breakpoint = (
            breakpoint_region(own_directory(node_dir, rank), own.breakpoint_bytes)
            if own.breakpoint_bytes
            else None
        )
        self.boundary = tuple(
            BoundarySlot(own_directory(node_dir, rank), number, own.boundary_slot_bytes)
            for number in range(own.num_boundary_slots)
        )
        self.replicas = {
            source: ReplicaMemory(
                regions=_regions(
                    replica_directory(node_dir, source, rank),
                    math.ceil(
                        num_replica_regions(
                            replica_regions, has_pool=topology.ranks[source].num_slots > 0
                        )
                    ),
                    topology.ranks[source],
                ),
                pool=_pool(replica_directory(node_dir, source, rank), topology.ranks[source]),
            )
            for source in sources
        }
        self.group = parity
        self.parity = parity_files(own_directory(node_dir, rank), parity) if parity else ()
        self.take_up(Mappings())

    def stay_clear(self) -> None:
        """Take other regions than are there where one is kept of a rank: another layout may need these."""
        for source, replica in self.replicas.items():
            if len(replica.regions) == 1:
                directory, info = replica.regions[0].directory, self._topology.ranks[source]
                regions = _regions(directory, 1, info, is_clear=True)
                self.replicas[source] = ReplicaMemory(regions=regions, pool=replica.pool)
        self.take_up(self.mappings)

    @property
    def stripes(self) -> dict[int, tuple[int, int]]:
        """Ranges of a region that other ranks add to parity, by rank; none where they keep replicas."""
        if self.group is None:
            return {}
        return {peer: self.group.stripe(self.rank, peer) for peer in self.group.others(self.rank)}

    @property
    def is_lowest_on_node(self) -> bool:
        """True on the rank that does the work that is needed once per node."""
        return self.rank == self._topology.lowest_on_node(self._node).rank

    @property
    def num_own_bytes(self) -> int:
        """Bytes of this rank's regions, pool and breakpoint: the state in them."""
        return sum(file.num_bytes for file in self._own_files() if file not in self.boundary)

    @property
    def num_missing_bytes(self) -> int:
        """Bytes that `open` will take, besides the files that are there."""
        missing = [file.num_bytes for file in self._files() if not file.is_in_place]
        return sum(missing) + len(missing) * self._topology.ranks[self.rank].index_bytes

    def open(self, restored: tuple[Start, int] | None) -> None:
        """Map everything; raises OSError if the memory directory cannot be made or has no room.

        Args:
            restored: writer and iteration of the state that is to be kept: regions and replicas that hold
                it get its iteration, and so are not overwritten before their owner says so.
        """
        for file in self._files():
            file.open()
            if isinstance(file, Region) and restored and holds(file.index_path, *restored):
                file.iteration = restored[1]

        if restored and (kept := self.parity_of(*restored)) is not None:
            kept.iteration = restored[1]

    def parity_store(self) -> ParityStore | None:
        """Return what keeps parity in this memory, which is open; None where there are replicas."""
        return None if self.group is None else ParityStore(self.parity, self.rank, self.group)

    def parity_of(self, start: Start, iteration: int) -> ParityFile | None:
        """Return the parity of a state that a start wrote; None if there is none that is whole."""
        wanted = start, iteration, self.group
        for each in self.parity:
            head = each.head()
            if head and (head.identity.start, head.iteration, head.group) == wanted:
                return each
        return None

    def take_up(self, mappings: Mappings) -> None:
        """Open files in these mappings from now on; what they have of other files is unmapped."""
        self.mappings = mappings
        mappings.keep_only({file.data_path: file.num_bytes for file in self._files()})
        for file in self._files():
            file.mappings = mappings

    def _files(self) -> Iterator[MappedFile]:
        yield from self._own_files()
        yield from self.parity
        for replica in self.replicas.values():
            yield from replica.regions
            if replica.pool is not None:
                yield replica.pool

    def _own_files(self) -> Iterator[MappedFile]:
        yield from self.regions
        if self.pool is not None:
            yield self.pool
        if self.breakpoint is not None:
            yield self.breakpoint
        yield from self.boundary

    def pin(self) -> None:
        """Let the GPU copy into this rank's own memory directly; raises PinError if it cannot."""
        paths = (file.data_path for file in self._own_files())
        self.mappings.pin(paths, _register, _unregister)

    def close(self) -> None:
        """Unpin and unmap everything unless the mappings last; the files stay."""
        for file in self._files():
            file.close()

    def remove_left_overs(self) -> None:
        """Remove what other placements, settings or starts have left in this rank's share of the node."""
        here = {info.rank for info in self._topology.on_node(self._node)}
        for directory in self.node_dir.iterdir() if self.node_dir.is_dir() else ():
            owner, holder = rank_and_holder(directory.name)
            is_orphan = holder is not None and holder not in here
            is_dismissed = holder == self.rank and owner != holder and owner not in self.replicas
            if (is_orphan and self.is_lowest_on_node) or is_dismissed:
                shutil.rmtree(directory, ignore_errors=True)
        in_use = {path for file in self._files() for path in _paths(file)}
        for directory in sorted({path.parent for path in in_use}):
            for path in directory.iterdir():
                if _OURS.fullmatch(path.name) and path not in in_use:
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove this rank's memory, and the node's with the last rank; the run has ended cleanly."""
        for directory in sorted({file.data_path.parent for file in self._files()}):
            shutil.rmtree(directory, ignore_errors=True)
        if self.is_lowest_on_node:
            remove_node(self.node_dir)


def _paths(file: MappedFile) -> tuple[Path, ...]:
    return (file.data_path, file.index_path) if isinstance(file, IndexedFile) else (file.data_path,)


def _pool(directory: Path, info: RankInfo) -> UnitPool | None:
    return UnitPool(directory, info.slot_bytes, info.num_slots) if info.num_slots else None


def _regions(
    directory: Path, count: int, info: RankInfo, *, is_clear: bool = False
) -> tuple[Region, ...]:
    """Return regions; they stay clear of regions of another size, which may still be needed.

    Args:
        is_clear: whether to stay clear of all that are there.
    """
    found = directory.iterdir() if directory.is_dir() else ()
    matches = ((path, _REGION.fullmatch(path.name)) for path in found)
    sizes = {int(match[1]): path.stat().st_size for path, match in matches if match}
    others = [each for each in sizes if is_clear or sizes[each] != info.region_bytes]
    first = max(others) + 1 if others else 0
    if sizes and not others and count == 1:
        first = min(sizes)  # a start that has stayed clear has left no other
    return tuple(
        Region(directory, number, info.region_bytes) for number in range(first, first + count)
    )


def holds(index_path: Path, start: Start, iteration: int) -> bool:
    """Return whether a region holds the state of an iteration that a start wrote."""
    try:
        index = decode(read_private(index_path), IndexHead, str(index_path))
    except OSError:
        return False
    found = (index.identity.start, index.iteration)
    return found == (start, iteration) and index.is_whole


def _register(address: int, num_bytes: int) -> str:
    """Register memory with CUDA; return why that failed, or nothing."""
    cudart = torch.cuda.cudart()
    with waiting(num_bytes / SLOWEST_BYTES_PER_S):
        error = cudart.cudaHostRegister(address, num_bytes, 0)
    if int(error) == 0:
        return ""
    # CUDA keeps the error for the next launch of this thread, which would be blamed: here it is.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").neg_()
    text = cudart.cudaGetErrorString(error)
    return f"cudaHostRegister of {size_text(num_bytes)} failed with error {int(error)} ({text})"


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
