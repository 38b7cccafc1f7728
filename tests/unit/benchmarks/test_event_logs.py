"""Event logs of a job: the last digests, and parts that were degraded."""

from typing import Any

import pytest

from benchmarks.recoveries import check_not_degraded, digests_of

ITERATION = {"event": "iteration", "iteration": 3}


def digest(one: str, all_: str) -> dict[str, Any]:
    return {"event": "state_digest", "sha256": one, "sha256_all": all_}


def test_digests_are_those_of_the_last_state() -> None:
    logs = [[digest("a", "b"), ITERATION, digest("c", "d")], [digest("a", "b")]]
    assert digests_of(logs) == [("c", "d"), ("a", "b")]


def test_rank_without_a_digest_is_refused() -> None:
    with pytest.raises(AssertionError, match="rank 1 has written no digest"):
        digests_of([[digest("a", "b")], [ITERATION]])


def test_degraded_part_is_refused_with_its_rank() -> None:
    check_not_degraded([[ITERATION], []])
    with pytest.raises(AssertionError, match="rank 1: .*memory"):
        check_not_degraded([[], [{"event": "degraded", "part": "memory"}]])
