"""Reading the next tensor while the one before is written."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor


def read_ahead[Item, Content](
    items: Iterable[Item], read: Callable[[Item], Content]
) -> Iterator[tuple[Item, Content]]:
    """Yield items with what was read of them, in their order.

    One thread calls `read`, and is one item ahead: besides what the caller has, one more is in memory.
    """
    with ThreadPoolExecutor(1, "moe_ft-read") as reader:
        pending: deque[tuple[Item, Future[Content]]] = deque()
        for item in items:
            pending.append((item, reader.submit(read, item)))
            if len(pending) > 1:
                yield _first(pending)
        while pending:
            yield _first(pending)


def _first[Item, Content](
    pending: deque[tuple[Item, Future[Content]]],
) -> tuple[Item, Content]:
    item, content = pending.popleft()
    return item, content.result()
