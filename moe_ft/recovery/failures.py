"""Failures of starts that continued from a state: their causes, and notes that outlive the processes.

Only failures that speak against the state are noted: a recovery that fails while it puts back or replays, and
training whose loss or gradients are rejected. A machine that breaks twice says nothing about a state.
After two that are the same the state is passed over; a recovery of some stages alone that fails for the logs
that it replays is passed over after one. Each rank writes to its node's memory directory; what a node has
noted is lost with its memory.

Also here: the kind of a failure, for verdicts.py, as its exception tells it.
"""

import errno
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType

import msgspec
import torch
import torch.distributed as dist

from moe_ft.errors import (
    ConfigError,
    CorruptionError,
    CorruptStateError,
    JobStoreError,
    LinksEndedError,
    LockLostError,
    RejectedResultError,
    RepairError,
    StorageAwayError,
    UnrecoverableError,
)
from moe_ft.files.private_files import write_atomically
from moe_ft.verdicts import Failure, FailureKind

_MOST_TRIES = 2
_MOST_NOTES = 32
_MOST_CHARACTERS = 200


class Attempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A start that continued from a state and failed.

    Attributes:
        start: name of the start that wrote the state.
        iteration: of the state.
        failure: how and where it failed, equal for equal failures.
        by: name of the start that failed.
        is_local: whether it speaks against the recovery of some stages alone, and not against the state.
    """

    start: str
    iteration: int
    failure: str
    by: str
    is_local: bool = False


_ATTEMPTS = msgspec.json.Decoder(list[Attempt])


def note_attempt(node_dir: Path, rank: int, attempt: Attempt) -> None:
    """Add a failure to the notes of a rank; raises OSError if the directory cannot be written."""
    attempts = [*_read(_path(node_dir, rank)), attempt]
    write_atomically(_path(node_dir, rank), msgspec.json.encode(attempts[-_MOST_NOTES:]))


def read_attempts(node_dir: Path) -> list[Attempt]:
    """Return all failures that the ranks of a node have noted."""
    paths = sorted(node_dir.glob("failed_*.json"))
    return [attempt for path in paths for attempt in _read(path)]


def failed_too_often(attempts: Iterable[Attempt]) -> dict[tuple[str, int], str]:
    """Return repeated failures by the name of the state's writer and its iteration."""
    attempts = [each for each in attempts if not each.is_local]
    starts: dict[tuple[str, int, str], set[str]] = defaultdict(set)
    for each in attempts:
        starts[each.start, each.iteration, each.failure].add(each.by)
    return {
        (start, iteration): failure
        for (start, iteration, failure), by in starts.items()
        if len(by) >= _MOST_TRIES
    }


def failed_locally(attempts: Iterable[Attempt]) -> dict[tuple[str, int], str]:
    """Return the failures of recoveries by some stages alone, likewise: one is enough."""
    return {(each.start, each.iteration): each.failure for each in attempts if each.is_local}


def describe(error: BaseException) -> str:
    """Return an exception in a form that is the same when it happens again."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"[:_MOST_CHARACTERS]


def _path(node_dir: Path, rank: int) -> Path:
    return node_dir / f"failed_{rank:05d}.json"


def _read(path: Path) -> list[Attempt]:
    with suppress(OSError, ValueError):  # a hint that is lost costs one more try
        return _ATTEMPTS.decode(path.read_bytes())
    return []


# Messages of Megatron's rerun state machine, which checks losses and gradients, and of its optimizer.
_REJECTIONS = ("found nan", "found inf", "unexpected result ")

_ELSEWHERE = re.compile(r"gloo|nccl|connection|timed out|socket|\bstore\b|cuda error")


def is_timeout(error: BaseException) -> bool:
    """Return whether a rank has waited for another one for too long."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def is_rejected(error: BaseException) -> bool:
    """Return whether checks have rejected a loss or gradients: NaN, infinity, or a spike."""
    text = str(error).lower()
    return isinstance(error, RejectedResultError) or any(each in text for each in _REJECTIONS)


def speaks_against_logs(error: BaseException) -> bool:
    """Return whether a replay has failed for the boundary logs that it was given.

    They are the same the next time; a connection over which one did not come may be better then.
    """
    cause = error.__cause__
    is_of_logs = isinstance(error, CorruptStateError | UnrecoverableError)
    # A refusal by the other node is an OSError without a number.
    has_number = isinstance(cause, OSError) and cause.errno is not None
    is_of_network = has_number or isinstance(cause, ConnectionError | TimeoutError)
    return is_of_logs and not is_of_network


def speaks_against_state(error: BaseException) -> bool:
    """Return whether the state may be the cause, rather than the machine, the network or another rank."""
    is_elsewhere = isinstance(
        error,
        OSError
        | MemoryError
        | torch.OutOfMemoryError
        | dist.DistError
        | ConfigError
        | CorruptionError
        | UnrecoverableError,
    )
    says_elsewhere = _ELSEWHERE.search(str(error).lower()) is not None
    return is_rejected(error) or not (is_elsewhere or says_elsewhere)


_BROKEN_DEVICE = re.compile(r"\becc\b|nvlink|\bxid\b|fallen off the bus", re.IGNORECASE)
_OF_DEVICE = re.compile(
    r"cuda error|cuda failure|cudaerror|cublas_status|cudnn_status", re.IGNORECASE
)
_OWN_MISTAKE = "device-side assert"  # of a kernel: an index that is out of range comes again
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|_alloc_failed", re.IGNORECASE)
_OF_NETWORK = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed out|socket", re.IGNORECASE
)
_OTHERS_GONE = (
    dist.DistError,
    ConnectionError,
    TimeoutError,
    JobStoreError,
    LinksEndedError,
    RepairError,
)
_OF_STORAGE = ("EIO", "ENOSPC", "EDQUOT", "ESTALE", "EROFS", "ENODEV", "EREMOTEIO")
_KINDS = {getattr(errno, name): FailureKind.STORAGE for name in _OF_STORAGE} | {
    errno.ENOMEM: FailureKind.OUT_OF_MEMORY
}
_ERRNO = re.compile(r"\[Errno (\d+)\]")
_TORCH = ("builtins", "torch", "torch.distributed")
_STORAGE_CODE = ("/fsspec/", "/s3fs/", "/gcsfs/", "/adlfs/", "/botocore/", "/aiobotocore/")
_DATA_CODE = re.compile(
    r"/torch/utils/data/|/megatron/(core|training)/datasets/|/megatron/bridge/data/"
)
_DATA_FUNCTIONS = ("__next__", "get_batch")
# Parts of messages that differ from start to start.
_CHANGING = re.compile(r"0x[0-9a-f]+|(?<=pid )\d+|(?<=pid\(s\) )[\d, ]+|(?<=Process )\d+")
_TRIED = re.compile(r".*?tried to allocate [\d.]+ \w+", re.IGNORECASE)


def failure_of(
    error: BaseException, *, rank: int, iteration: int, section: str = "", node: str = ""
) -> Failure:
    """Return the failure of a rank that an exception ends."""
    kind = kind_of(error)
    what = _CHANGING.sub("...", _words_of(error))
    if kind is FailureKind.OUT_OF_MEMORY and (tried := _TRIED.match(what)):
        what = tried[0]  # what is free, and who has the rest, changes
    return Failure(rank=rank, kind=kind, what=what, iteration=iteration, section=section, node=node)


def kind_of(error: BaseException) -> FailureKind:
    """Return the kind of a failure by its exception, by what has led to it, and where they were raised."""
    for each in _chain(error):
        frames = [*traceback.walk_tb(each.__traceback__)]
        code = [frame.f_code for frame, _ in frames]
        in_data = any(map(_reads_data, code))
        if (kind := _known_kind(each, code)) is not None:
            is_of_link = kind is FailureKind.NETWORK and isinstance(each, OSError)
            return FailureKind.STORAGE if in_data and is_of_link else kind
        if in_data:
            return FailureKind.DATA
    return FailureKind.CODE


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those that have led to it."""
    seen = set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _reads_data(code: CodeType) -> bool:
    return code.co_name in _DATA_FUNCTIONS or _DATA_CODE.search(code.co_filename) is not None


def _known_kind(error: BaseException, code: Iterable[CodeType]) -> FailureKind | None:
    """Return the kind of one exception; None if it may be any mistake in the code or the data."""
    match error:
        case CorruptionError():
            return FailureKind.CORRUPTION
        case StorageAwayError() | CorruptStateError() | LockLostError():
            return FailureKind.STORAGE
        case ConfigError() | UnrecoverableError():
            return FailureKind.REFUSED
        case MemoryError() | torch.OutOfMemoryError():
            return FailureKind.OUT_OF_MEMORY
        case OSError() if any(part in each.co_filename for each in code for part in _STORAGE_CODE):
            return FailureKind.STORAGE
        case OSError() if (found := _ERRNO.search(str(error))) and int(found[1]) in _KINDS:
            return _KINDS[int(found[1])]  # a data loader keeps the text alone
    if is_rejected(error):
        return FailureKind.REJECTED
    is_of_torch = isinstance(error, RuntimeError) and type(error).__module__ in _TORCH
    if is_of_torch and (kind := _kind_of_text(str(error))) is not None:
        return kind
    return FailureKind.NETWORK if isinstance(error, _OTHERS_GONE) else None


def _kind_of_text(text: str) -> FailureKind | None:
    """Return the kind that a RuntimeError of torch tells."""
    if _NO_MEMORY.search(text):
        return FailureKind.OUT_OF_MEMORY
    if _BROKEN_DEVICE.search(text):
        return FailureKind.DEVICE
    if _OF_NETWORK.search(text):
        return FailureKind.NETWORK
    is_of_device = _OF_DEVICE.search(text) and _OWN_MISTAKE not in text
    return FailureKind.DEVICE if is_of_device else None


def _words_of(error: BaseException) -> str:
    """Return an exception as `describe` does; of one that a data loader's process raised, the original."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].startswith("Caught "):
        return lines[-1][:_MOST_CHARACTERS]
    return describe(error)
