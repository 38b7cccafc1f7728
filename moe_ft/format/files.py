"""The files that moe_ft writes, as typed schemas: index, manifest, and their encoding with a checksum.

A data file is a valid safetensors file; beside it lies its index. Everything here is JSON; reading
validates types, names and paths, and a checksum over the body finds every flipped byte. No pickle.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash

from moe_ft.errors import CorruptStateError, FormatVersionError
from moe_ft.format.packings import DTYPE_BYTES, Packing, Piece, pieces
from moe_ft.format.records import Count, ExpertProgress, Gaps, IterationRecord

FORMAT = "moe_ft/1"
MANIFEST_NAME = "manifest.json"
FROZEN = "frozen"  # among the origins: all parameters that are not trained

_Checksum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
_Level = Annotated[str, msgspec.Meta(pattern="^(full|compute)$")]
_DType = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(DTYPE_BYTES)})$")]
_Packing = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(Packing)})$")]
_ENVELOPE = re.compile(rb'\{"xxh3_64":"([0-9a-f]{16})","body":')


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor of a unit version: a flat range of one parameter's weight, master or moment.

    Attributes:
        parameter: global name of the parameter.
        key: "param" (fp32 master), "weight" (what forward uses) or the optimizer's own name.
        start, end: flat range in the parameter as this rank holds it, in elements.
        dtype: safetensors' name of the type that the live tensor has.
        offset: in bytes, from the start of the unit.
        is_absent: the tensor did not exist yet; its bytes mean nothing.
        packing: how its numbers are kept here.
    """

    parameter: str
    key: str
    start: Count
    end: Count
    dtype: _DType
    offset: Count
    is_absent: bool = False
    packing: _Packing = Packing.EXACT.value


class UnitEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One unit version in a data file.

    Attributes:
        offset: in bytes, from the start of the file.
        iteration, incarnation: of the state that it is of, and the start of the processes that saved it.
        checksum: XXH3-64 of its num_bytes bytes.
        file: the data file: on storage relative to the persist directory, in memory a name beside the
            index; empty for the file of the index itself.
        routed_tokens: of an expert, how many tokens it got so far.
        gaps: of an expert, the ranges of them whose updates recoveries have dropped.
    """

    offset: Count
    num_bytes: Count
    iteration: Count
    level: _Level
    checksum: _Checksum
    tensors: tuple[TensorEntry, ...]
    incarnation: Count = 0
    file: str = ""
    routed_tokens: Count = 0
    gaps: Gaps = ()

    @property
    def version(self) -> tuple[int, int]:
        """What tells versions of one unit apart; later ones are greater."""
        return self.incarnation, self.iteration


class ParameterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What other layouts must know of a parameter.

    Attributes:
        shape: as this rank holds it.
        tp_dim: dimension cut by tensor parallelism, -1 if none.
        tp_size, tp_rank: into how many pieces, and which one this is.
        num_halves: 2 where two matrices are stacked (SwiGLU's gate and up), each cut on its own.
    """

    shape: tuple[Count, ...]
    tp_dim: int = -1
    tp_size: int = 1
    tp_rank: int = 0
    num_halves: int = 1


class Start(NamedTuple):
    """One start of the processes of a run, in the histories of it and of those that continue it.

    Attributes:
        number: greater than that of every start that this one found something of. Starts that could not see
            each other may have the same.
        resumed_at: the iteration that it continued from.
        name: random; tells starts of one number apart.
        is_chosen: whether --moe-ft-recover-from iter_N named that iteration.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    resumed_at: Annotated[int, msgspec.Meta(ge=0)]
    name: str = ""
    is_chosen: bool = False


History = tuple[Start, ...]


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which run wrote something.

    Attributes:
        job_id: --moe-ft-job-id.
        lineage: the fresh start that the run goes back to.
        history: the starts of the run up to the writer's own, which is the last.
        fingerprint: the settings that state depends on, by flag.
        world_size: number of ranks.
        strategy: --moe-ft-strategy.
        division: how a strategy that saves experts in parts divides them; versions of runs that divide them
            otherwise do not fit together. Empty where they are saved whole.
        replay_settings: the settings, by flag, that an iteration which is run again must have; empty
            where a recovery runs none.
        superseded: names of the starts that the last one has found something of and does not continue.
        began_with: what begins the run from the weights of another, as flags; empty without.
    """

    job_id: str
    lineage: str
    history: History
    fingerprint: dict[str, Any]
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    strategy: str
    division: str = ""
    replay_settings: dict[str, Any] = {}
    superseded: tuple[str, ...] = ()
    began_with: str = ""

    @property
    def start(self) -> Start:
        """The start that wrote it."""
        return self.history[-1]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's files of a checkpoint on storage; paths are relative to the persist directory."""

    rank: Count
    index: str
    index_checksum: _Checksum
    data: str
    num_bytes: Count


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes one data file: a region, a replica or a persisted file.

    Attributes:
        rank: global rank whose state it is.
        iteration: of the snapshot, of the last one in a window.
        file: name of the data file, in the directory of the index.
        file_bytes: its size.
        header_bytes, header_checksum: of the safetensors header, with its length field and padding.
        units: unit versions by unit name; those of a window are FULL at different iterations.
        parameters: by global name.
        records: ``[snapshot]`` of consecutive iterations, the last one is that of `iteration`.
        origins: checksums, by unit name, of this rank's weights in the state that the run began with. A
            unit without a version has not changed since, or all that it has changed by is lost.
        progress: of the experts of this rank's stage, where a strategy saves only some of them.
        older: files of other checkpoints on storage that hold some of the units.
        window: how many snapshots together hold every unit.
        num_snapshots: how many of them the file holds so far.
        compute: ``[snapshot]`` by unit name, the weights that forward uses, of units that only a later
            snapshot of the window holds at FULL.
        complete_iteration: the newest that all ranks were known to have when this was taken, None if there
            was none: without one nothing is lost where other ranks' state is missing.
    """

    format: str
    identity: Identity
    rank: Count
    node: str
    iteration: Count
    file: str
    file_bytes: Count
    header_bytes: Count
    header_checksum: _Checksum
    units: dict[str, UnitEntry]
    parameters: dict[str, ParameterEntry]
    records: tuple[IterationRecord, ...]
    origins: dict[str, _Checksum] = {}
    progress: ExpertProgress | None = None
    older: tuple[FileEntry, ...] = ()
    window: Annotated[int, msgspec.Meta(ge=1)] = 1
    num_snapshots: Annotated[int, msgspec.Meta(ge=1)] = 1
    compute: tuple[dict[str, UnitEntry], ...] = ()
    complete_iteration: Count | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no snapshot of the window is missing."""
        return self.num_snapshots == self.window

    def entries(self) -> Iterator[tuple[str, UnitEntry]]:
        """Yield all unit versions with the names of their units."""
        yield from self.units.items()
        for units in self.compute:
            yield from units.items()


class IndexHead(msgspec.Struct, frozen=True):
    """The part of an index that says what it is of; the rest is passed over. See `Index`."""

    format: str
    identity: Identity
    rank: Count
    iteration: Count
    file: str
    file_bytes: Count
    header_checksum: _Checksum
    window: int = 1
    num_snapshots: int = 1
    complete_iteration: Count | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no snapshot of the window is missing."""
        return self.num_snapshots == self.window


class UnitSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a checkpoint finds one unit.

    Attributes:
        iteration: of the version; if ranks have different ones, the oldest.
        files: positions in the manifest's files followed by its older ones.
    """

    iteration: Count
    level: _Level
    files: tuple[Count, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Makes the files of an iteration a checkpoint; written last.

    Attributes:
        files: of this checkpoint.
        older: files of other checkpoints that this one needs.
        units: by name; a unit that was never saved is not listed.
        window: snapshots that each file holds; with more than one, units are FULL at different iterations,
            and `window` - 1 replayed iterations bring all of them to `iteration`.
    """

    format: str
    identity: Identity
    iteration: Count
    created_s: float
    files: tuple[FileEntry, ...]
    units: dict[str, UnitSource]
    older: tuple[FileEntry, ...] = ()
    window: Annotated[int, msgspec.Meta(ge=1)] = 1


def tensor_pieces(tensor: TensorEntry) -> tuple[Piece, ...]:
    """Return the parts that a tensor has in its file; their offsets are from its own."""
    return pieces(tensor.dtype, tensor.end - tensor.start, Packing(tensor.packing))


def tensor_bytes(tensor: TensorEntry) -> int:
    """Return the size of one tensor in its file, in bytes."""
    last = tensor_pieces(tensor)[-1]
    return last.offset + last.num_bytes


def lossy_packings(units: Iterable[UnitEntry]) -> dict[str, str]:
    """Return how tensors are kept that do not come back as they were, by key ("param", "exp_avg", ...).

    Where units have them in different formats, each is named.
    """
    found: dict[str, set[str]] = {}
    for unit in units:
        for tensor in unit.tensors:
            if Packing(tensor.packing).is_lossy and not tensor.is_absent:
                found.setdefault(tensor.key, set()).add(tensor.packing)
    return {key: " or ".join(sorted(names)) for key, names in sorted(found.items())}


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3-64 checksum of some bytes, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def encode(body: Index | Manifest) -> bytes:
    """Return the file's content: a JSON object that holds the body and the checksum of its bytes."""
    encoded = msgspec.json.encode(body)
    return b'{"xxh3_64":"%s","body":%s}\n' % (checksum(encoded).encode(), encoded)


def decode[Body: (Index, IndexHead, Manifest)](
    content: bytes, kind: type[Body], where: str
) -> Body:
    """Return what `encode` wrote, after checking it.

    Args:
        content: of the file.
        kind: Index, IndexHead or Manifest.
        where: its path, for messages.

    Raises:
        CorruptStateError: if the checksum, the schema, the format or a path in it is wrong.
    """
    match = _ENVELOPE.match(content)
    if match is None or not content.endswith(b"}\n"):
        raise CorruptStateError(f"{where} is not a complete file of moe_ft")
    body = memoryview(content)[match.end() : -2]
    if checksum(body) != match[1].decode():
        raise CorruptStateError(f"{where} is corrupt: its checksum does not match its content")
    _check_format(body, where)
    try:
        decoded = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:  # of lists in lists in lists
        raise CorruptStateError(
            f"{where} does not have the form of {kind.__name__}: {error}"
        ) from error
    _check(decoded, where)
    return decoded


class _AnyFormat(msgspec.Struct):
    format: str = ""


def _check_format(body: memoryview, where: str) -> None:
    """Raise FormatVersionError for a file of another format, whose schema is not known here."""
    try:
        found = msgspec.json.decode(body, type=_AnyFormat).format
    except (msgspec.MsgspecError, RecursionError):
        return  # the schema says what is wrong
    if found and found != FORMAT:
        raise FormatVersionError(f"{where} has format '{found}', this version reads {FORMAT}")


def _check(decoded: Index | IndexHead | Manifest, where: str) -> None:
    """Check what a schema cannot say."""
    if not decoded.identity.history:
        raise CorruptStateError(f"{where} belongs to no incarnation")
    if isinstance(decoded, Manifest):
        _check_manifest(decoded, where)
        return
    check_path(decoded.file, where)
    if "/" in decoded.file:
        raise CorruptStateError(f"{where}: the data file '{decoded.file}' is not beside its index")
    if isinstance(decoded, Index):
        _check_index(decoded, where)


def _check_manifest(manifest: Manifest, where: str) -> None:
    files = (*manifest.files, *manifest.older)
    for entry in files:
        check_path(entry.index, where)
        check_path(entry.data, where)
    for name, source in manifest.units.items():
        if any(position >= len(files) for position in source.files):
            raise CorruptStateError(f"{where}: unit {name} names a file that is not listed")


def _check_index(index: Index, where: str) -> None:
    for entry in index.older:
        check_path(entry.index, where)
        check_path(entry.data, where)
    if not index.records or index.records[-1].iteration != index.iteration:
        raise CorruptStateError(f"{where} holds no record of its iteration {index.iteration}")
    if index.header_bytes > index.file_bytes:
        raise CorruptStateError(f"{where}: the header reaches beyond the end of its file")
    _check_window(index, where)
    for name, unit in index.entries():
        if unit.file:
            check_path(unit.file, where)
        elif unit.offset + unit.num_bytes > index.file_bytes:
            raise CorruptStateError(f"{where}: unit {name} reaches beyond the end of its file")
        for tensor in unit.tensors:
            if tensor.end < tensor.start or tensor.offset + tensor_bytes(tensor) > unit.num_bytes:
                raise CorruptStateError(f"{where}: unit {name} has an impossible tensor")


def _check_window(index: Index, where: str) -> None:
    """Check that an index holds the snapshots of consecutive iterations that it says it does."""
    if index.num_snapshots > index.window:
        raise CorruptStateError(f"{where} holds more snapshots than its window has")
    if index.window == 1:
        return
    first = index.iteration - index.num_snapshots + 1
    iterations = [record.iteration for record in index.records]
    is_consecutive = iterations == list(range(first, index.iteration + 1))
    are_inside = all(first <= unit.iteration <= index.iteration for _, unit in index.entries())
    if not is_consecutive or not are_inside or len(index.compute) != len(iterations):
        raise CorruptStateError(
            f"{where} does not hold {index.num_snapshots} consecutive snapshots up to iteration "
            f"{index.iteration}"
        )


def check_path(path: str, where: str) -> None:
    """Raise CorruptStateError for a path that is absolute or leaves its directory."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise CorruptStateError(f"{where} names '{path}', which leaves its directory")


def differing_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Describe the settings in which two fingerprints differ, of those that both have."""
    return [
        f"{name}: {theirs[name]} there, {ours[name]} now"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]


def incomparable_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Name the settings that only one of two fingerprints has, as those of two versions may."""
    return sorted(ours.keys() ^ theirs.keys())
