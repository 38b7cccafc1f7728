"""Requests of ranks to the writer process of their node, and its results: small files in one directory.

The directory is on tmpfs, and each file is replaced as a whole, so that either side may die at any moment.
engine/persist/client.py asks, engine/persist/writer.py serves. No torch.
"""

from pathlib import Path

import msgspec


class PersistRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Write one rank's region to storage; announced before the vote on its window, its data alone.

    Attributes:
        index, data: absolute paths of the region's files.
        rotating: units in the pool that are written in addition to the region.
        previous: this rank's index on storage, relative to the persist directory, whose checkpoint holds
            the other units that the region does not; empty if there is none.
        writes_manifest: also wait for the other ranks' indexes and write the manifest (rank 0).
        deadline_s: how long it may take; nobody waits any longer. Each side counts on its own clock.
        number: of the rank's request, from 1: one that is made again is another one, with its own result.
    """

    rank: int
    iteration: int
    index: str
    data: str
    rotating: tuple[str, ...]
    previous: str
    tag: str
    writes_manifest: bool
    deadline_s: float
    number: int = 1


class WriterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a writer's standard input: not its arguments, which everybody may read.

    Attributes:
        url: of the persist directory; may hold a password.
        lock_owner: of the start that has the lock of the persist directory; empty for a writer that does not
            serve rank 0, the only one that harms others by writing manifests and deleting.
    """

    url: str
    keep: int
    parent: int
    lock_owner: str
    keeps_whole: bool = False
    log_format: str = "text"


class PersistResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a request, or the notice before it; it succeeded if the error is empty.

    The notice tells that the rank's part is on storage, and with that of rank 0 the checkpoint complete. The
    result tells that it was read back, or what failed.

    Attributes:
        seconds: that the writer was busy with it, as far as the notice before does not count them.
    """

    rank: int
    iteration: int
    path: str
    number: int = 1
    error: str = ""
    num_bytes: int = 0
    num_units: int = 0
    seconds: float = 0.0
    warning: str = ""
    has_lost_previous: bool = False


REQUEST = msgspec.json.Decoder(PersistRequest)
RESULT = msgspec.json.Decoder(PersistResult)
SETTINGS = msgspec.json.Decoder(WriterSettings)


def request_path(directory: Path, rank: int) -> Path:
    """Return where a rank's request lies until it is done."""
    return directory / f"request_{rank:05d}.json"


def announced_path(directory: Path, rank: int) -> Path:
    """Return where a rank says what it will probably request."""
    return directory / f"announced_{rank:05d}.json"


def confirmed_path(directory: Path) -> Path:
    """Return where rank 0 names its index of the newest checkpoint all have read back: older ones may go."""
    return directory / "confirmed"


def notice_path(directory: Path, rank: int) -> Path:
    """Return where the notice lies that a rank's part is written."""
    return directory / f"written_{rank:05d}.json"


def result_path(directory: Path, rank: int) -> Path:
    """Return where a rank's result lies until it is read."""
    return directory / f"result_{rank:05d}.json"
