"""Link of a rank and its zygote: memory that both see, also after the rank has died, and real beats in it.

How silence counts is simulated (tests/simulation/repairs).
"""

import os
import signal
import threading

import pytest

from moe_ft.keeper.link import (
    Heart,
    Link,
    Pulse,
    own_link,
    period_s,
    retire_own,
    set_own_link,
    wants_repair,
)
from tests.waiting import wait_for


def test_rank_that_arms_itself_stays_armed_when_it_is_killed() -> None:
    link = Link()
    assert not link.is_armed and not link.is_replacement
    pid = os.fork()
    if pid == 0:
        link.arm()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert link.is_armed
    link.disarm()
    assert not link.is_armed


def test_zygote_sees_the_beats_of_a_rank_and_the_rank_sees_why_it_ends() -> None:
    link = Link()
    assert (link.beats, link.limit_s, link.hung_s) == (0, 0, 0)
    pid = os.fork()
    if pid == 0:
        link.expect_beats(7.5)
        link.beat()
        link.beat()
        os._exit(0)
    os.waitpid(pid, 0)
    assert (link.beats, link.limit_s) == (2, 7.5)
    link.note_hang(8.25)
    assert link.hung_s == 8.25
    assert Link(5.0, link.hung_s).predecessor_hung_s == 8.25


def test_zygote_has_the_token_of_a_rank_for_its_replacement() -> None:
    link = Link()
    assert link.token == ""
    pid = os.fork()
    if pid == 0:
        link.token = "0123456789abcdef" * 2
        os._exit(0)
    os.waitpid(pid, 0)
    assert Link(5.0, token=link.token).token == link.token == "0123456789abcdef" * 2


def test_process_that_is_to_end_retires_the_link_that_it_has() -> None:
    assert own_link() is None
    retire_own()  # has none: nothing to do
    link = Link(died_s=12.5)
    assert link.is_replacement
    link.arm()
    set_own_link(link)
    try:
        assert own_link() is link
        retire_own()
        assert not link.is_armed
        link.arm()  # its training thread does not know yet
        assert not link.is_armed
    finally:
        set_own_link(None)


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
    link = Link()
    heart = Heart(link, limit_s=1.0)
    assert link.limit_s == 0, "it is not started"
    heart.start()
    heart.start()  # once
    assert link.limit_s == 1.0
    wait_for(lambda: link.beats > 2, "beats")
    heart.close()
    beats = link.beats
    assert link.limit_s == 0
    assert not [each for each in threading.enumerate() if each.name == "moe_ft-heart"]
    assert link.beats == beats
    Heart(link, limit_s=1.0).close()  # was never started


def test_stopped_process_does_not_beat() -> None:
    link = Link()
    pid = os.fork()
    if pid == 0:
        Heart(link, limit_s=0.2).start()
        signal.pause()
    try:
        wait_for(lambda: link.beats > 1, "beats")
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        pulse = Pulse(link)
        wait_for(lambda: pulse.silent_s() > link.limit_s, "silence")
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: pulse.silent_s() == 0, "a beat")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
