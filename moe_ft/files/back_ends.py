"""Back ends of storage that are not local: how much is asked of them at a time, their errors and randomness.

S3, Google and Azure are object_store.py, which storage.py opens; others are packages of fsspec.
"""

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moe_ft.errors import MoeFtError

PART_BYTES = 8 << 20
NUM_AT_A_TIME = 8  # parts of one object that go up, and ranges that are read
_CHUNK_BYTES = 16 << 20
_LEAST_BYTES = 2 << 20  # of a large range that is read in parts
# Packages of object stores draw jitter and shuffle connections, on threads of their own, from Python's
# generator. Training draws from it too: an iteration that is run again must draw the same numbers.
_PACKAGES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "aiohttp_retry", "azure", "botocore", "boto3", "decorator"}
    | {"fsspec", "gcsfs", "google", "requests", "s3fs", "s3transfer", "tenacity", "urllib3"}
)
_own_random = random.Random()
_num_modules = 0  # when they were last looked through


def create_object(
    file_system: Any, full: str, content: bytes, is_there: Callable[[str], bool]
) -> None:
    """Write a small object; raise FileExistsError if it is there, as far as the back end can tell."""
    if not _has_conditional_put(file_system):
        if is_there(full):
            raise FileExistsError(full)
        file_system.pipe_file(full, content)
        return
    try:
        file_system.pipe_file(full, content, mode="create")
    except Exception as error:  # back ends have errors of their own for it
        if not is_there(full):
            raise
        raise FileExistsError(full) from error


def _has_conditional_put(file_system: Any) -> bool:
    put = getattr(file_system, "_pipe_file", file_system.pipe_file)
    return "mode" in inspect.signature(put).parameters


def cut(pieces: Iterable[memoryview], most_bytes: int) -> Iterator[memoryview]:
    """Yield pieces, larger ones in parts."""
    for piece in pieces:
        for start in range(0, len(piece), most_bytes):
            yield piece[start : start + most_bytes]


def write_pieces(file_system: Any, full: str, pieces: Iterable[memoryview], num_bytes: int) -> None:
    """Write a large file to a back end that is not local.

    Args:
        num_bytes: of all pieces, 0 if that is unknown.
    """
    if hasattr(file_system, "pipe_pieces"):
        file_system.pipe_pieces(full, pieces, num_bytes)
        return
    with file_system.open(full, "wb") as file:
        for part in cut(pieces, _CHUNK_BYTES):
            file.write(part)


def _takes_several(file_system: Any) -> bool:
    """Return whether requests of several threads may be under way at the same time."""
    return bool(getattr(file_system, "async_impl", False))


def piece_bytes(file_system: Any, num_bytes: int) -> int:
    """Return how much of a range one request reads."""
    if not _takes_several(file_system) or num_bytes <= PART_BYTES:
        return _CHUNK_BYTES
    return min(max(num_bytes // NUM_AT_A_TIME, _LEAST_BYTES), PART_BYTES)


def call_ahead(file_system: Any, reads: Iterable[Callable[[], bytes]]) -> Generator[bytes]:
    """Yield what functions return, in order; threads call the next ones where the back end takes several."""
    if _takes_several(file_system):
        return call_at_once(reads, NUM_AT_A_TIME)
    return (read() for read in reads)


def call_at_once(reads: Iterable[Callable[[], bytes]], most: int) -> Generator[bytes]:
    """Yield what functions return, in order; threads call up to so many of them at a time."""
    under_way: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(most, "moe_ft-read") as pool:
        try:
            for read in reads:
                under_way.append(pool.submit(read))
                if len(under_way) == most:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for each in under_way:
                each.cancel()


def as_of_files(error: Exception, what: str) -> Exception:
    """Return an error of a back end as an OSError; without the page of details that obstore adds.

    Args:
        what: the operation, for the message; one of files or of moe_ft has its own.
    """
    text, details, _ = str(error).partition("\n\nDebug source:")
    reason = " ".join(text.split()) if details else text
    if isinstance(error, OSError | MoeFtError):
        return type(error)(reason) if details else error
    return OSError(f"{what}: {type(error).__name__}: {reason}")


def give_own_random() -> None:
    """Let the packages that are loaded by now draw from a generator of their own. Cheap if none is new."""
    global _num_modules
    if len(sys.modules) == _num_modules:
        return
    _num_modules = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and getattr(module, "random", None) is random:
            module.random = _own_random  # type: ignore[attr-defined]
