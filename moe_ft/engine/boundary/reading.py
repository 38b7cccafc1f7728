"""Reading of boundary logs: verified tensors that neighbours have sent.

The files are those that engine/boundary/log.py writes. Logs of the own node are read in place; what one rank
needs of others is fetched ahead of its replay: while an iteration is replayed, what the next one receives is
on its way, and earlier ones are given up.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from moe_ft.errors import CorruptStateError, UnrecoverableError
from moe_ft.files.private_files import open_private, read_private
from moe_ft.format.boundary import BoundaryIndex, Direction, SentTensor
from moe_ft.format.encoding import check_content, decode

Key = tuple[int, Direction, int]  # receiver, direction, ordinal


class LoggedIteration:
    """Everything that one rank has sent in one iteration, or what it has sent to one other."""

    def __init__(self, index: BoundaryIndex, bytes_of: Callable[[SentTensor], memoryview]) -> None:
        """Take an index, and what returns the bytes of a tensor, which are checked when they are read."""
        self.index = index
        self._bytes_of = bytes_of
        self._sent: dict[Key, SentTensor] = {
            (each.neighbour, each.direction, each.ordinal): each for each in index.sent
        }

    def find(self, receiver: int, direction: Direction, ordinal: int) -> SentTensor | None:
        """Return what was sent, None if that was less."""
        return self._sent.get((receiver, direction, ordinal))

    def num_sent(self, receiver: int, direction: Direction) -> int:
        """Return how many tensors a rank has received in a direction."""
        return sum(key[:2] == (receiver, direction) for key in self._sent)

    def read(self, sent: SentTensor) -> memoryview:
        """Return the bytes of a tensor; raises CorruptStateError if they do not have its checksum."""
        data = self._bytes_of(sent)
        check_content(f"{_describe(self.index)}: {sent.name}", data, sent.checksum)
        return data

    def check(self, receiver: int | None = None) -> None:
        """Read everything, or what one rank received; raises as `read` does."""
        for sent in self.index.sent:
            if receiver in (None, sent.neighbour):
                self.read(sent)


NeighbourLog = Mapping[int, LoggedIteration]  # by iteration


def _describe(index: BoundaryIndex) -> str:
    return f"{index.file} of rank {index.rank}, iteration {index.iteration}"


def open_slot(index_path: Path, index: BoundaryIndex | OSError | None = None) -> LoggedIteration:
    """Return what a slot holds, mapped as long as something of it is used.

    Args:
        index: as `find_indexes` has found it; None to read it.

    Raises:
        OSError: if it cannot be read, belongs to another user, or is damaged.
    """
    if isinstance(index, OSError):
        raise index
    index = index or decode(read_private(index_path), BoundaryIndex, str(index_path))
    with open_private(index_path.parent / index.file) as file:
        try:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError as error:  # an empty file
            raise CorruptStateError(f"{index_path.parent / index.file}: {error}") from error
    if len(content) != index.file_bytes:
        raise CorruptStateError(
            f"{_describe(index)} has {len(content)} bytes, not {index.file_bytes}"
        )
    header = content[: index.header_bytes]
    check_content(f"{_describe(index)}: its header", header, index.header_checksum)
    return LoggedIteration(index, lambda sent: content[sent.offset : sent.offset + sent.num_bytes])


# Returns the bytes of a file: its number of the index, the offset and the number of bytes.
FetchRange = Callable[[BoundaryIndex, int, int], memoryview]


class FetchedLog(Mapping[int, LoggedIteration]):
    """Log of a neighbour on another node, by iteration. Used by the training thread, in ascending order."""

    def __init__(
        self,
        indexes: Mapping[int, BoundaryIndex],
        receiver: int,
        fetch: FetchRange,
        close: Callable[[], None] = lambda: None,
        here: Mapping[int, LoggedIteration] | None = None,
    ) -> None:
        """Take what there is for the rank that replays; `fetch` is called by one thread, `close` at the end.

        Further iterations may be on the own node, where the neighbour has moved.
        """
        self._indexes = dict(indexes)
        self._here = here or {}
        self._receiver = receiver
        self._fetch = fetch
        self._close = close
        self._thread: ThreadPoolExecutor | None = None  # until the replay begins
        self._pending: dict[int, Future[LoggedIteration]] = {}

    def _begin(self, iteration: int) -> None:
        if iteration in self._indexes and iteration not in self._pending:
            index = self._indexes[iteration]
            self._thread = self._thread or ThreadPoolExecutor(1, "moe_ft-boundary")
            self._pending[iteration] = self._thread.submit(self._fetch_iteration, index)

    def _fetch_iteration(self, index: BoundaryIndex) -> LoggedIteration:
        wanted = [each for each in index.sent if each.neighbour == self._receiver]
        contents = {each.offset: self._fetch(index, each.offset, each.num_bytes) for each in wanted}
        return LoggedIteration(index, lambda sent: contents[sent.offset])

    def __getitem__(self, iteration: int) -> LoggedIteration:
        """Return what was sent in an iteration; waits until it is here, and fetches the next one.

        Raises KeyError if the log does not have it, UnrecoverableError if it cannot be fetched.
        """
        for earlier in [each for each in self._pending if each < iteration]:
            del self._pending[earlier]
        self._begin(iteration)
        self._begin(iteration + 1)
        if iteration not in self._indexes:
            return self._here[iteration]
        try:
            return self._pending[iteration].result()
        except OSError as error:
            rank = self._indexes[iteration].rank
            raise UnrecoverableError(
                f"the boundary log of rank {rank}, iteration {iteration}, cannot be fetched: {error}"
            ) from error

    def __iter__(self) -> Iterator[int]:
        """Yield the iterations, ascending."""
        return iter(sorted({*self._indexes, *self._here}))

    def __len__(self) -> int:
        """Return the number of iterations."""
        return len({*self._indexes, *self._here})

    def close(self) -> None:
        """End the thread; what was fetched is given up."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
        self._close()
