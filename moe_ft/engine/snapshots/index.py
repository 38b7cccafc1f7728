"""The index of a window after each of its snapshots: places of all unit versions, records of iterations.

Taking a record is state/record.py.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from moe_ft.engine.memory.layout import UnitPlace
from moe_ft.engine.memory.regions import MappedFile, UnitPool
from moe_ft.engine.snapshots.copying import Absent
from moe_ft.engine.snapshots.job import SnapshotRequest
from moe_ft.errors import SnapshotError
from moe_ft.format.encoding import FORMAT, checksum, checksums
from moe_ft.format.entries import ModelPlaces, ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.format.records import IterationRecord
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.record import CapturedRecord, encode
from moe_ft.units import Level


class RecordLog:
    """Records of the iterations of which a snapshot was begun.

    The training thread appends and trims; the copy worker completes and reads.
    """

    def __init__(
        self,
        complete: Callable[[CapturedRecord], None],
        encode: Callable[[CapturedRecord], IterationRecord] = encode,
    ) -> None:
        """Take what adds to a captured record what moves together with the weights."""
        self._complete = complete
        self._encode = encode
        self._lock = threading.Lock()
        self._records: dict[int, CapturedRecord | IterationRecord] = {}

    def append(self, iteration: int, record: CapturedRecord) -> None:
        """Add a record that was just captured."""
        with self._lock:
            self._records[iteration] = record

    def complete(self, iteration: int) -> None:
        """Complete a record while its weights are copied, on the stream that copies them."""
        with self._lock:
            record = self._records[iteration]
        assert not isinstance(record, IterationRecord)
        self._complete(record)

    def read(self, first: int, last: int) -> tuple[IterationRecord, ...]:
        """Return the records of consecutive iterations, all of which are complete."""
        return tuple(self._read(iteration) for iteration in range(first, last + 1))

    def _read(self, iteration: int) -> IterationRecord:
        with self._lock:
            record = self._records[iteration]
        if isinstance(record, IterationRecord):
            return record
        encoded = self._encode(record)
        with self._lock:
            self._records[iteration] = encoded
        return encoded

    def trim(self, first: int, last: int) -> None:
        """Forget all records but those of some consecutive iterations. No snapshot may be under way."""
        with self._lock:
            kept = {each: self._records[each] for each in self._records if first <= each <= last}
            self._records = kept


class SnapshotIndexer:
    """Describes the snapshots of one rank."""

    def __init__(
        self,
        identity: Identity,
        rank: int,
        node: str,
        parameters: Sequence[LocalParameter],
        records: RecordLog,
        pool: UnitPool | None = None,
        origins: Mapping[str, str] | None = None,
        model: ModelPlaces | None = None,
    ) -> None:
        self._identity = identity
        self._rank = rank
        self._node = node
        self._entries: dict[str, ParameterEntry] = {each.name: each.entry for each in parameters}
        self._records = records
        self._pool = pool
        self._origins = dict(origins or {})
        self._model = model or ModelPlaces()

    def describe(self, request: SnapshotRequest, absent: Absent, before: Index | None) -> Index:
        """Describe the window up to a snapshot; raises SnapshotError without the one before."""
        if request.position and (before is None or before.num_snapshots != request.position):
            raise SnapshotError("the snapshot before it in its window has failed")
        layout = request.layout
        places = layout.snapshots[request.position]
        full = [place for place in places if place.level is Level.FULL]
        compute = [place for place in places if place.level is Level.COMPUTE]
        units = {**request.carried, **(before.units if before else {})}
        units.update(self._describe(request, request.region, full, absent))
        if request.slots:
            assert self._pool is not None
            units.update(
                self._describe(request, self._pool, request.slots, absent, self._pool.name)
            )
        retained = {
            name: entry
            for name, entry in (request.at_peers or {}).items()
            if name in units and entry.version != units[name].version
        }
        window = len(layout.snapshots)
        weights = dict(self._describe(request, request.region, compute, absent))
        return Index(
            format=FORMAT,
            identity=self._identity,
            rank=self._rank,
            node=self._node,
            iteration=request.iteration,
            file=request.region.data_path.name,
            file_bytes=layout.num_bytes,
            header_bytes=len(layout.header),
            header_checksum=checksum(layout.header),
            units=units,
            parameters=self._entries,
            records=self._records.read(request.iteration - request.position, request.iteration),
            origins=self._origins,
            progress=request.plan.progress() if request.plan.progress else None,
            window=window,
            num_snapshots=request.position + 1,
            compute=(*(before.compute if before else ()), weights) if window > 1 else (),
            complete_iteration=request.keep_iteration,
            model=self._model,
            retained=retained or msgspec.UNSET,
        )

    def _describe(
        self,
        request: SnapshotRequest,
        file: MappedFile,
        places: Sequence[UnitPlace],
        absent: Absent,
        name: str = "",
    ) -> Iterator[tuple[str, UnitEntry]]:
        with memoryview(file.mapping) as content:
            found = checksums([content[each.offset :][: each.num_bytes] for each in places])
            for place, own in zip(places, found, strict=True):
                routed_tokens, gaps = request.plan.rotating.get(place.unit, (0, ()))
                yield (
                    str(place.unit),
                    UnitEntry(
                        offset=place.offset,
                        num_bytes=place.num_bytes,
                        iteration=request.iteration,
                        level=place.level.value,
                        checksum=own,
                        tensors=_mark_absent(place.tensors, absent),
                        incarnation=self._identity.start.number,
                        file=name,
                        routed_tokens=routed_tokens,
                        gaps=gaps,
                    ),
                )


def _mark_absent(tensors: tuple[TensorEntry, ...], absent: Absent) -> tuple[TensorEntry, ...]:
    if not absent:
        return tensors
    return tuple(
        msgspec.structs.replace(tensor, is_absent=(tensor.parameter, tensor.key) in absent)
        for tensor in tensors
    )
