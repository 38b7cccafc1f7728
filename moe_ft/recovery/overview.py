"""Overview of the state of another layout: what each rank must know of all ranks that were, found together.

Each index is opened by one rank, of its node if there are any. What ranks had for themselves travels once for
all that had the same, and what an index holds of the model as numbers of tensors. Each rank then opens only
those indexes that have something of what it needs (recovery/left.py).
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from moe_ft.format.entries import ModelPlaces
from moe_ft.format.index import Index
from moe_ft.format.records import Gaps, IterationRecord, OptimizerRecord
from moe_ft.planning.recovery import Source, Version
from moe_ft.planning.relayout import ModelTensor, VersionNumber, blocks_of
from moe_ft.recovery.readers import Readers
from moe_ft.topology import Topology

_HEAD = msgspec.msgpack.Decoder(Index)
_NO_CHECKSUM = "0" * 16


@dataclass(kw_only=True, slots=True)
class Overview:
    """Findings of some ranks, later of all.

    Attributes:
        ranks: of which an index of the state could be read.
        heads: what ranks had for themselves, an encoded index without units, by the lowest that had it.
        holders: by the numbers of the tensors that an index has parts of, the places of such indexes.
        gaps: by layer name, the start and iteration of the newest state, and its ``[expert]`` gaps.
    """

    ranks: set[int] = field(default_factory=set)
    heads: dict[bytes, int] = field(default_factory=dict)
    holders: dict[frozenset[int], list[int]] = field(default_factory=dict)
    gaps: dict[str, tuple[VersionNumber, Sequence[Gaps]]] = field(default_factory=dict)

    def add(self, number: int, version: Version, index: Index, *, is_own: bool) -> None:
        """Add an index.

        Args:
            number: its place among all of them.
            is_own: whether it is of the state that is to be recovered.
        """
        if is_own:
            self.ranks.add(version.rank)
            head = _head(index)
            self.heads[head] = min(version.rank, self.heads.get(head, version.rank))
        self.holders.setdefault(_tensors_in(index), []).append(number)
        age = version.start.number, version.iteration
        self._add_gaps({layer: (age, gaps) for layer, gaps in _gaps_of(index).items()})

    def _add_gaps(self, gaps: Mapping[str, tuple[VersionNumber, Sequence[Gaps]]]) -> None:
        for layer, found in gaps.items():
            self.gaps[layer] = max(self.gaps.get(layer, found), found, key=lambda each: each[0])

    def indexes(self) -> dict[int, Index]:
        """Return the heads by rank, ascending."""
        ordered = sorted((rank, head) for head, rank in self.heads.items())
        return {
            rank: msgspec.structs.replace(_HEAD.decode(head), rank=rank) for rank, head in ordered
        }

    def places_of(self, tensors: Iterable[int]) -> set[int]:
        """Return the places of the indexes that have parts of some tensors."""
        wanted = frozenset(tensors)
        found = (places for held, places in self.holders.items() if held & wanted)
        return {place for places in found for place in places}


def merge(found: Sequence[Overview]) -> Overview:
    """Return what several ranks have found."""
    merged = Overview()
    for each in found:
        merged.ranks |= each.ranks
        for head, rank in each.heads.items():
            merged.heads[head] = min(rank, merged.heads.get(head, rank))
        for held, places in each.holders.items():
            merged.holders.setdefault(held, []).extend(places)
        merged._add_gaps(each.gaps)
    return merged


def in_order(sources: Iterable[Source]) -> list[Source]:
    """Return sources in an order that is the same on all ranks."""
    found = {each.version: each for each in sources}
    return sorted(found.values(), key=lambda each: (each.version.node or "", each.version.path))


def look_at_share(
    sources: Sequence[Source],
    own: Iterable[Source],
    readers: Readers,
    topology: Topology,
    rank: int,
) -> Overview:
    """Open the sources that are this rank's to open.

    Args:
        sources: as `in_order` returns them.
        own: those of the state that is to be recovered.
    """
    ranks_on: dict[str | None, list[int]] = defaultdict(list)
    for info in topology.ranks:
        ranks_on[info.node].append(info.rank)
    everyone, known, overview = [info.rank for info in topology.ranks], set(own), Overview()
    for number, source in enumerate(sources):
        near = ranks_on.get(source.version.node, everyone)
        if near[number % len(near)] != rank:
            continue
        if (reader := readers.open(source)) is not None:
            overview.add(number, source.version, reader.index, is_own=source in known)
    return overview


def number_of(tensor: ModelTensor) -> int:
    """Return the number of a tensor of the model, of any kind; two may share one, which costs a look."""
    return zlib.crc32(f"{tensor.key}{tensor.stacked_at}".encode())


def _tensors_in(index: Index) -> frozenset[int]:
    names = {tensor.parameter for _, unit in index.entries() for tensor in unit.tensors}
    entries = (index.parameters[name] for name in names if name in index.parameters)
    blocks = (block for each in entries for block in blocks_of(each.places or (), each.shape, ""))
    return frozenset(number_of(block.tensor) for block in blocks)


def _gaps_of(index: Index) -> Mapping[str, Sequence[Gaps]]:
    return index.progress.gaps if index.progress else {}


def _head(index: Index) -> bytes:
    """Return what a rank had for itself that another layout may need: the same bytes if it was the same."""
    head = msgspec.structs.replace(
        index,
        rank=0,
        node="",
        file="",
        file_bytes=0,
        header_bytes=0,
        header_checksum=_NO_CHECKSUM,
        units={},
        parameters={},
        records=tuple(map(_shared, index.records)),
        origins={},
        older=(),
        compute=(),
        complete_iteration=None,
        model=ModelPlaces(buffers=index.model_places.buffers),
        retained=msgspec.UNSET,
    )
    return msgspec.msgpack.encode(head)


def _shared(record: IterationRecord) -> IterationRecord:
    """Return a record without what new_record.py makes again."""
    optimizers = tuple(map(_without_names, record.optimizers))
    return msgspec.structs.replace(
        record, optimizers=optimizers, rng={}, extra_state={}, tokens_per_expert={}
    )


def _without_names(record: OptimizerRecord) -> OptimizerRecord:
    """Return the record of an optimizer with each number of steps once, and one scale if there are any."""
    steps = {str(number): step for number, step in enumerate(sorted({*record.steps.values()}))}
    scales = dict(sorted(record.scales.items())[:1])
    return msgspec.structs.replace(record, steps=steps, scales=scales)
