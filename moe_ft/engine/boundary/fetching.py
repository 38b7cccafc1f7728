"""Boundary logs in another node's memory: what one rank needs of them, fetched ahead of its replay.

While an iteration is replayed, what the next one receives is on its way; earlier ones are given up. So two
iterations of what a neighbour has sent are in memory, however many are replayed.
engine/boundary/reading.py reads the logs of a rank's own node in place.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from moe_ft.engine.boundary.reading import LoggedIteration
from moe_ft.errors import UnrecoverableError
from moe_ft.format.boundary import BoundaryIndex, SentTensor

# Returns the bytes of a file: its number of the index, the offset and the number of bytes.
FetchRange = Callable[[BoundaryIndex, int, int], memoryview]


class _FetchedIteration(LoggedIteration):
    """Tensors that one rank has sent to another in one iteration."""

    def __init__(self, index: BoundaryIndex, contents: Mapping[int, memoryview]) -> None:
        self._take(index)
        self._contents = contents  # by offset

    def _read_bytes(self, sent: SentTensor) -> memoryview:
        return self._contents[sent.offset]


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
        """Prepare; nothing is fetched yet.

        Args:
            indexes: by iteration.
            receiver: the rank that replays.
            fetch: called by one thread.
            close: called at the end, when nothing is fetched any more.
            here: further iterations, in the memory of the own node: the neighbour has moved.
        """
        self._indexes, self._here = dict(indexes), here or {}
        self._receiver, self._fetch, self._close = receiver, fetch, close
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
        return _FetchedIteration(index, contents)

    def __getitem__(self, iteration: int) -> LoggedIteration:
        """Return what was sent in an iteration; waits until it is here, and fetches the next one.

        Raises:
            KeyError: if the log does not have it.
            UnrecoverableError: if it cannot be fetched.
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
