"""Signals that ranks get when their node is told to end."""

import signal

import pytest

from moe_ft.cluster.agent import PlannedEnd

SAVING = ("train.py", "--exit-signal-handler", "--exit-signal", "SIGUSR1")


def test_ranks_get_the_exit_signal_and_sigterm_in_time_to_leave_breakpoints() -> None:
    now = 0.0
    end = PlannedEnd(SAVING, 100, lambda: now)
    assert end.due_signal(False) is None and not end.is_new()
    end.tell()
    assert end.is_new() and not end.is_new()
    assert end.due_signal(False) is None  # a spare may take over
    assert end.due_signal(True) is signal.SIGUSR1
    assert end.due_signal(True) is None
    now = 60.0
    assert end.due_signal(True) is signal.SIGUSR1, "again: ranks that were starting have ignored it"
    now = 71.0
    assert [end.due_signal(True) for _ in range(2)] == [signal.SIGTERM, None]


@pytest.mark.parametrize(
    ("words", "grace_s", "why", "at_sigterm"),
    [
        (SAVING, 30, "30 s (--grace) are not enough: ", "what they have in memory stays"),
        (SAVING[:1], 100, "without --exit-signal-handler: ", "what they have in memory stays"),
        (SAVING[:2], 100, "all ranks have 100 s (--grace) to bring", "save and end"),
        (SAVING[:2], 20, "all ranks have 20 s (--grace) to bring", "save and end"),
    ],
)
def test_ranks_without_another_signal_get_sigterm_at_once(
    words: tuple[str, ...], grace_s: float, why: str, at_sigterm: str
) -> None:
    end = PlannedEnd(words, grace_s, lambda: 0.0)
    end.tell()
    assert why in end.describe() and at_sigterm in end.describe_sigterm()
    assert end.due_signal(True) is signal.SIGTERM
