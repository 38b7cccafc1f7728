"""Reading of boundary logs: verified tensors that a neighbour has sent, for a stage that replays alone.

The files are those that engine/boundary/log.py writes. engine/boundary/player.py answers receives from them.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path

from moe_ft.engine.boundary.slots import INDEX_NAME
from moe_ft.errors import CorruptStateError
from moe_ft.files.private_files import open_private, read_private
from moe_ft.format.boundary import BoundaryIndex, Direction, SentTensor
from moe_ft.format.encoding import checksum, decode

Key = tuple[int, Direction, int]  # receiver, direction, ordinal


class LoggedIteration:
    """Everything that one rank has sent in one iteration."""

    def __init__(self, index: BoundaryIndex, content: memoryview) -> None:
        """Take an index and the bytes of its data file; what is in them is checked when it is read.

        Raises:
            CorruptStateError: if the file has another size or header.
        """
        self._take(index)
        self._content = content
        if len(content) != index.file_bytes:
            raise CorruptStateError(
                f"{self._where} has {len(content)} bytes, not {index.file_bytes}"
            )
        if checksum(content[: index.header_bytes]) != index.header_checksum:
            raise CorruptStateError(f"{self._where}: its header does not match its checksum")

    def _take(self, index: BoundaryIndex) -> None:
        self.index = index
        self._sent: dict[Key, SentTensor] = {
            (each.neighbour, each.direction, each.ordinal): each for each in index.sent
        }

    @property
    def _where(self) -> str:
        return f"{self.index.file} of rank {self.index.rank}, iteration {self.index.iteration}"

    def find(self, receiver: int, direction: Direction, ordinal: int) -> SentTensor | None:
        """Return what was sent, None if there is nothing of that number."""
        return self._sent.get((receiver, direction, ordinal))

    def num_sent(self, receiver: int, direction: Direction) -> int:
        """Return how many tensors a rank has received in a direction."""
        return sum(key[:2] == (receiver, direction) for key in self._sent)

    def read(self, sent: SentTensor) -> memoryview:
        """Return the bytes of a tensor.

        Raises:
            CorruptStateError: if they do not have its checksum.
        """
        data = self._read_bytes(sent)
        if checksum(data) != sent.checksum:
            raise CorruptStateError(f"{self._where}: {sent.name} does not match its checksum")
        return data

    def _read_bytes(self, sent: SentTensor) -> memoryview:
        return self._content[sent.offset : sent.offset + sent.num_bytes]

    def check(self, receiver: int | None = None) -> None:
        """Read everything, or what one rank received; raise CorruptStateError if something is damaged."""
        for sent in self.index.sent:
            if receiver in (None, sent.neighbour):
                self.read(sent)


NeighbourLog = Mapping[int, LoggedIteration]  # by iteration


def decode_iteration(index: bytes, content: memoryview, where: str) -> LoggedIteration:
    """Return what an index and a data file hold, wherever they were fetched from.

    Raises:
        CorruptStateError: if they are damaged.
    """
    return LoggedIteration(decode(index, BoundaryIndex, where), content)


def open_slot(index_path: Path) -> LoggedIteration:
    """Return what a slot holds. The file stays mapped as long as something of it is used.

    Raises:
        OSError: if it cannot be read, belongs to another user, or is damaged.
    """
    index = decode(read_private(index_path), BoundaryIndex, str(index_path))
    with open_private(index_path.parent / index.file) as file:
        try:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError as error:  # an empty file
            raise CorruptStateError(f"{index_path.parent / index.file}: {error}") from error
    return LoggedIteration(index, content)


def open_log(directory: Path) -> tuple[NeighbourLog, list[str]]:
    """Return the log of the rank whose memory is in a directory, by iteration, and what cannot be used.

    The rank must not write to it meanwhile.
    """
    found: dict[int, LoggedIteration] = {}
    problems: list[str] = []
    names = [each.name for each in directory.iterdir()] if directory.is_dir() else []
    for name in sorted(filter(INDEX_NAME.fullmatch, names)):
        try:
            logged = open_slot(directory / name)
        except OSError as error:
            problems.append(str(error))
            continue
        known = found.get(logged.index.iteration)
        if known is None or known.index.identity.start < logged.index.identity.start:
            found[logged.index.iteration] = logged
    return found, problems
