"""A writer in a thread, and its ranks: for tests of requests and results."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.requests import (
    PersistRequest,
    PersistResult,
    request_path,
    result_path,
)
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.files.private_files import write_atomically
from moe_ft.files.storage import Storage, file_tag
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from tests.unit.moe_ft.builders import (
    make_identity,
)
from tests.waiting import wait_for

FAR_S = 120.0
TWO_RANKS = make_identity(world_size=2)


def tag_of(region: Region) -> str:
    """Return the tag of the files of the run that a region belongs to; damaged ones get one too."""
    try:
        index = decode(region.index_path.read_bytes(), Index, str(region.index_path))
    except OSError:
        return file_tag(make_identity())
    return file_tag(index.identity)


def request_for(region: Region, *, rank: int = 0, deadline_s: float = FAR_S) -> PersistRequest:
    """Return the request to write a region, and the manifest for rank 0."""
    assert region.iteration is not None
    return PersistRequest(
        rank=rank,
        iteration=region.iteration,
        index=str(region.index_path),
        data=str(region.data_path),
        rotating=(),
        previous="",
        tag=tag_of(region),
        writes_manifest=rank == 0,
        deadline_s=deadline_s,
    )


def confirm(worker: PersistWorker, index: str) -> None:
    """Have older checkpoints deleted, in this thread, for one that all ranks have read back."""
    worker._delete_older(Path(), index.encode())


class Office:
    """A worker in a thread, and what its ranks see of it."""

    def __init__(self, directory: Path, url: str, keep: int = 2) -> None:
        self.directory, self.storage = directory / "persist", Storage(url)
        self.directory.mkdir()
        self._should_end = threading.Event()
        self.worker = PersistWorker(self.directory, self.storage, keep=keep)
        self._thread = threading.Thread(
            target=self.worker.run, args=(self._should_end,), daemon=True
        )

    def start(self) -> None:
        """Let the worker serve."""
        self._thread.start()

    def ask(self, region: Region, *, rank: int = 0, waits_s: float = FAR_S) -> None:
        """Ask for a region of a rank to be written."""
        request = request_for(region, rank=rank, deadline_s=waits_s)
        write_atomically(request_path(self.directory, rank), msgspec.json.encode(request))

    def result(self, rank: int = 0) -> PersistResult:
        """Wait for a rank's result, and take it."""
        path = result_path(self.directory, rank)
        wait_for(path.exists, f"the result of rank {rank}")
        content = path.read_bytes()
        path.unlink()
        return msgspec.json.decode(content, type=PersistResult)

    def close(self) -> None:
        """End the worker."""
        self._should_end.set()
        if self._thread.is_alive():
            self._thread.join()


@contextmanager
def opened(directory: Path, url: str, *, starts: bool = True, keep: int = 2) -> Iterator[Office]:
    office = Office(directory, url, keep)
    try:
        if starts:
            office.start()
        yield office
    finally:
        office.close()
