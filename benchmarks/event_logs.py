"""Event logs of a job, as the benchmarks of recoveries read them; tests/harness.py reads the files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
Log = Sequence[Event]  # all events of a rank, in their order


def events_of(log: Log, kind: str) -> Iterator[Event]:
    """Yield the events of a kind."""
    return (each for each in log if each["event"] == kind)


def check_not_degraded(logs: Sequence[Log]) -> None:
    """Check that every background part has worked on every rank.

    Raises:
        AssertionError: if one has not.
    """
    for rank, log in enumerate(logs):
        degraded = next(events_of(log, "degraded"), None)
        assert degraded is None, f"rank {rank}: {degraded}"


def digests_of(logs: Sequence[Log]) -> list[tuple[str, str]]:
    """Return ``[rank]`` the digests of the last state.

    Raises:
        AssertionError: if a rank has written none.
    """
    found = [[*events_of(log, "state_digest")] for log in logs]
    for rank, own in enumerate(found):
        assert own, f"rank {rank} has written no digest"
    return [(own[-1]["sha256"], own[-1]["sha256_all"]) for own in found]
