"""Checks of what is stored: recovery, retention and `verify` all ask here whether it is sound.

Bytes of units against their checksums are format/index.py; here they are read for that. No torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np

from moe_ft.engine.memory.job_directory import rank_and_holder
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, iteration_directory
from moe_ft.format.encoding import checksum, decode
from moe_ft.format.entries import FileEntry, UnitEntry, tensor_pieces
from moe_ft.format.identity import History
from moe_ft.format.index import Index, IndexHead, check_header, check_unit
from moe_ft.format.manifest import Manifest
from moe_ft.format.packings import DTYPES

_BLOCK_BYTES = 1 << 20  # stays in a processor's cache
_PIECE_BYTES = 8 << 20
_TAKEN_BACK = "was taken back: its rank has read other bytes than it had written"


class Listings:
    """Sizes of files from one listing of each directory, made when it is first asked for."""

    def __init__(self, storage: Storage) -> None:
        self.url = storage.url
        self._storage = storage
        self._sizes: dict[str, dict[str, int]] = {}

    def size(self, path: str) -> int:
        """Return the size of a file in bytes; raises OSError if storage fails or it is not there."""
        directory, _, name = path.rpartition("/")
        if directory not in self._sizes:
            self._sizes[directory] = self._storage.sizes_in(directory)
        listed = self._sizes[directory].get(name)
        # A listing alone makes nothing missing: it may show a link without the size of its file.
        return self._storage.size(path) if listed is None else listed


def check_manifest(manifest: Manifest, path: str, where: str) -> None:
    """Raise CorruptStateError unless a manifest is one of a whole checkpoint of its directory's iteration."""
    directory = str(PurePosixPath(path).parent)
    if directory != iteration_directory(manifest.iteration):
        raise CorruptStateError(f"{where} claims iteration {manifest.iteration}, in {directory}")
    ranks, num_ranks = [file.rank for file in manifest.files], manifest.identity.world_size
    # The number may be anything: nothing is built of that size.
    if len(ranks) != num_ranks or ranks != list(range(num_ranks)):
        there = {*ranks}
        missing = [rank for rank in range(min(num_ranks, len(ranks) + 8)) if rank not in there]
        raise CorruptStateError(
            f"{where} names files of ranks {ranks[:8]} in this order, not one of each of {num_ranks} ranks; "
            f"the state of ranks {missing[:8]} is missing"
        )
    used = {position for source in manifest.units.values() for position in source.files}
    if not used:
        raise CorruptStateError(f"{where} lists no units")
    own = manifest.files
    if unlisted := [file.data for file in own if str(PurePosixPath(file.data).parent) != directory]:
        raise CorruptStateError(f"{where} names {unlisted[0]} as its own, in another directory")


def read_index(
    content: bytes,
    file: FileEntry,
    *,
    iteration: int | None,
    history: History | None,
    window: int | None,
    where: str,
) -> Index:
    """Return an index on storage; raises CorruptStateError unless it is the one that a manifest names.

    None stands for what is not known: of files of older checkpoints.
    """
    if checksum(content) != file.index_checksum:
        raise CorruptStateError(f"{where} is not the index that the manifest names")
    index = decode(content, Index, where)
    expected = {
        "rank": (index.rank, file.rank),
        "iteration": (index.iteration, iteration),
        "history": (index.identity.history, history),
        "window": (index.window, window),
        "size": (index.file_bytes, file.num_bytes),
        "data file": (str(PurePosixPath(file.index).with_name(index.file)), file.data),
    }
    for name, (found, wanted) in expected.items():
        if wanted is not None and found != wanted:
            raise CorruptStateError(f"{where} has {name} {found}, its manifest {wanted}")
    if not index.is_whole:
        raise CorruptStateError(f"{where} holds only a part of a window")
    return index


def read_index_file(storage: Storage, file: FileEntry) -> bytes:
    """Return the content of an index of a checkpoint; raises FileNotFoundError if its rank took it back."""
    try:
        return storage.read(file.index)
    except FileNotFoundError as error:
        if storage.exists(file.data):
            raise
        raise FileNotFoundError(f"{storage.url}/{file.index} {_TAKEN_BACK}") from error


def taken_back(storage: Storage, manifest: Manifest) -> str:
    """Return why a manifest is that of no checkpoint any more; empty if no rank has taken its part back."""
    names = {*storage.names_in(iteration_directory(manifest.iteration))}
    for file in manifest.files:
        paths = (file.index, file.data)
        if not any(PurePosixPath(each).name in names or storage.exists(each) for each in paths):
            return f"{file.index} {_TAKEN_BACK}"
    return ""


def check_checkpoint(storage: Storage, manifest: Manifest, listings: Listings) -> None:
    """Raise CorruptStateError unless a checkpoint is sound, as far as that shows without reading its data.

    Holds the indexes of one rank at a time. Raises OSError if something is not there.
    """
    older = {file.data: file for file in manifest.older}
    unread = set(older)
    for own in manifest.files:
        index = read_file(storage, manifest, own, listings)
        named = {unit.file for unit in index.units.values()} & set(older)
        there = {
            data: read_file(storage, manifest, older[data], listings) for data in sorted(named)
        }
        unread -= named
        _check_references(own, index, there)
    for data in sorted(unread):
        read_file(storage, manifest, older[data], listings)


def check_data(storage: Storage, index: Index, path: str, *, with_older: bool) -> None:
    """Read a rank's data and raise CorruptStateError unless it has the checksums of its index.

    Holds a piece at a time. What this machine has cached of the rank's own file is read again.
    """
    storage.forget_cached(path)
    check_header(index, storage.read(path, 0, index.header_bytes), f"{storage.url}/{path}")
    entries = [(name, unit) for name, unit in index.entries() if with_older or not unit.file]
    with closing(storage.read_each(_spans([unit for _, unit in entries], path))) as pieces:
        for name, unit in entries:
            own = islice(pieces, -(-unit.num_bytes // _PIECE_BYTES))
            check_unit(name, unit, own, f"{storage.url}/{unit.file or path}")


def _spans(units: Iterable[UnitEntry], path: str) -> Iterator[tuple[str, int, int]]:
    """Yield the pieces of units: the file of one may be a hole of any size."""
    for unit in units:
        end = unit.offset + unit.num_bytes
        for start in range(unit.offset, end, _PIECE_BYTES):
            yield unit.file or path, start, min(_PIECE_BYTES, end - start)


def check_sizes(listings: Listings, manifest: Manifest) -> None:
    """Raise OSError unless all data files of a checkpoint are there in the sizes that its manifest names."""
    for file in (*manifest.files, *manifest.older):
        _check_size(listings, file)


def read_file(
    storage: Storage, manifest: Manifest, file: FileEntry, sizes: Storage | Listings | None = None
) -> Index:
    """Return the index of one of a checkpoint's files, after checking all but the data's bytes.

    Raises OSError if the index is not what the manifest names, data is cut short, or something is not there.
    """
    is_own = file.rank < len(manifest.files) and file == manifest.files[file.rank]
    where = f"{storage.url}/{file.index}"
    index = read_index(
        read_index_file(storage, file),
        file,
        iteration=manifest.iteration if is_own else None,
        history=manifest.identity.history if is_own else None,
        window=manifest.window if is_own else None,
        where=where,
    )
    if index.identity.lineage != manifest.identity.lineage:
        raise CorruptStateError(
            f"{where} is of run {index.identity.lineage}, not {manifest.identity.lineage}"
        )
    _check_size(sizes or storage, file)
    return index


def check_references(manifest: Manifest, indexes: Mapping[str, Index]) -> None:
    """Raise CorruptStateError unless units that a checkpoint has in older files are there."""
    for own in manifest.files:
        _check_references(own, indexes[own.data], indexes)


def _check_references(own: FileEntry, index: Index, indexes: Mapping[str, Index]) -> None:
    for name, unit in index.units.items():
        there = indexes[unit.file].units.get(name) if unit.file in indexes else None
        is_there = there is not None and not there.file and there.checksum == unit.checksum
        if unit.file and not is_there:
            raise CorruptStateError(f"{own.index}: unit {name} is not in {unit.file}")


def _check_size(sizes: Storage | Listings, file: FileEntry) -> None:
    num_bytes = sizes.size(file.data)
    if num_bytes != file.num_bytes:
        raise CorruptStateError(
            f"{sizes.url}/{file.data} has {num_bytes} bytes, not {file.num_bytes}"
        )


def check_region(index: Index | IndexHead, path: Path) -> None:
    """Raise OSError unless a region in memory is its rank's, and is as long as it says."""
    owner, _ = rank_and_holder(path.parent.name)
    if owner != index.rank:
        raise CorruptStateError(f"{path} says rank {index.rank}, in the directory of rank {owner}")
    num_bytes = (path.parent / index.file).stat().st_size
    if num_bytes == 0 or num_bytes < index.file_bytes:
        raise CorruptStateError(
            f"{path}: {index.file} has {num_bytes} bytes, not {index.file_bytes}"
        )


def check_is_finite(unit: str, entry: UnitEntry, content: memoryview) -> None:
    """Raise CorruptStateError if a number of a unit version is not finite: training could not continue."""
    for tensor in entry.tensors:
        for piece in tensor_pieces(tensor) if not tensor.is_absent else ():
            if not DTYPES[piece.dtype].not_finite:
                continue
            start = tensor.offset + piece.offset
            if not _are_finite(piece.dtype, content[start : start + piece.num_bytes]):
                raise CorruptStateError(
                    f"{tensor.key} of {tensor.parameter} in unit {unit} holds NaN or infinity"
                )


def _are_finite(dtype: str, content: memoryview) -> bool:
    kind = np.dtype(f"u{DTYPES[dtype].num_bytes}")
    bits, all_set = np.frombuffer(content, kind), kind.type(DTYPES[dtype].not_finite)
    block = min(len(bits), _BLOCK_BYTES // bits.itemsize)
    room = np.empty(block, kind)
    for start in range(0, len(bits), block or 1):
        part = bits[start : start + block]
        if np.bitwise_and(part, all_set, out=room[: len(part)]).max() == all_set:
            return False
    return True
