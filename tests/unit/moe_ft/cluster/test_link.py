"""Link of a rank and its fork server: real beats, and flags that are read before any other.

How silence counts is simulated (tests/simulation/repairs); test_fork_server.py replaces ranks that die and
stop.
"""

import signal
import threading

import pytest

from moe_ft.cluster.link import (
    Heart,
    RankLink,
    exit_signal,
    period_s,
    wants_repair,
)
from tests.waiting import wait_for


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("train.py --moe-ft-repair auto --seed 1", True),
        ("train.py --moe-ft-repair=auto", True),
        ("train.py --moe-ft-repair auto --moe-ft-repair off", False),
        ("train.py --moe-ft-repair", False),
        ("train.py auto", False),
    ],
)
def test_last_value_of_the_flag_counts(line: str, wanted: bool) -> None:
    assert wants_repair(line.split()) == wanted


def test_looks_are_frequent_enough_for_short_limits_and_rare_for_long_ones() -> None:
    assert (period_s(2.0), period_s(600.0), period_s(0)) == (0.2, 1.0, 1.0)


def test_heart_beats_until_it_is_closed() -> None:
    link = RankLink()
    heart = Heart(link, limit_s=1.0)
    assert link.limit_s == 0, "it is not started"
    heart.start(20.0)
    assert link.limit_s == 20.0, "until the next call"
    heart.start()  # there is one thread
    assert link.limit_s == 1.0
    wait_for(lambda: link.beats > 2, "beats")
    heart.close()
    beats = link.beats
    assert link.limit_s == 0
    assert not [each for each in threading.enumerate() if each.name == "moe_ft-heart"]
    assert link.beats == beats
    Heart(link, limit_s=1.0).close()  # was never started


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("x.py --exit-signal SIGUSR1", None),
        ("x.py --exit-signal-handler", signal.SIGTERM),
        ("x.py --exit-signal-handler --exit-signal SIGUSR1", signal.SIGUSR1),
        ("--moe-ft-keep 3 -- x.py train.exit_signal=10", None),
        ("--moe-ft-keep 3 -- x.py train.exit_signal_handler=True", signal.SIGTERM),
        ("-- x.py train.exit_signal_handler=true train.exit_signal=10", signal.SIGUSR1),
        ("-- x.py train.exit_signal_handler=true train.exit_signal=x", None),
    ],
)
def test_signal_that_saves_and_ends_is_that_of_megatron_or_of_bridge(
    words: str, expected: signal.Signals | None
) -> None:
    assert exit_signal(words.split()) is expected
