"""Failures of starts that continued from a state: their causes, and notes that outlive the processes.

Only failures that speak against the state are noted: a recovery that fails while it puts back or replays, and
training whose loss or gradients are rejected. A machine that breaks twice says nothing about a state.
After two that are the same the state is passed over; a recovery of some stages alone that fails for the logs
that it replays is passed over after one. Each rank writes to its node's memory directory; what a node has
noted is lost with its memory.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from moe_ft.errors import (
    ConfigError,
    CorruptStateError,
    RejectedResultError,
    UnrecoverableError,
)
from moe_ft.files.private_files import write_atomically

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
        | UnrecoverableError,
    )
    says_elsewhere = _ELSEWHERE.search(str(error).lower()) is not None
    return is_rejected(error) or not (is_elsewhere or says_elsewhere)
