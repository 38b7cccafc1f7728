"""Findings of corruption are events, lines and exceptions that name the ranks."""

import pytest

from moe_ft.errors import CorruptionError
from moe_ft.events import EventLog
from moe_ft.loop.corruption import Check, Finding, accuse
from moe_ft.loop.listeners import LoopState
from tests.unit.fault_tolerance.loops import last_event


def test_finding_is_an_event_and_ends_the_iteration(event_log: EventLog) -> None:
    finding = Finding(
        check=Check.EQUAL, ranks=(2, 5), is_decided=False, where="router.weight", since=4
    )
    words = (
        "iteration 7: rank 2 or 5 is corrupt: its weights are not those of ranks that must have the same "
        r"\(router.weight\); the last check that passed was of iteration 4"
    )
    with pytest.raises(CorruptionError, match=words):
        accuse(event_log, LoopState(iteration=7), finding)
    assert last_event(event_log) == {
        "event": "corruption",
        "iteration": 7,
        "check": "equal weights",
        "ranks": [2, 5],
        "decided": False,
        "where": "router.weight",
        "since": 4,
    }


@pytest.mark.parametrize(
    ("ranks", "is_decided", "words"),
    [
        ((3,), True, "rank 3 is corrupt"),
        ((0, 1, 3), False, "rank 0, 1 or 3 is corrupt"),
        ((0, 1, 3), True, "rank 0, 1 and 3 are corrupt"),
    ],
)
def test_sentence_names_all_ranks(ranks: tuple[int, ...], is_decided: bool, words: str) -> None:
    finding = Finding(
        check=Check.AT_REST, ranks=ranks, is_decided=is_decided, where="w", since=None
    )
    assert str(finding).startswith(f"{words}: ") and str(finding).endswith("(w)")
