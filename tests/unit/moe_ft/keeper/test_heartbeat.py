"""Beats of a rank: silence counts while the zygote watches, and not while it did not run itself."""

import os
import signal
import threading

from moe_ft.keeper.heartbeat import Heart, Pulse, period_s
from moe_ft.keeper.link import Link
from tests.waiting import wait_for


def test_silence_is_counted_from_the_last_beat() -> None:
    link, now = Link(), [1000.0]
    link.expect_beats(20.0)
    pulse = Pulse(link, lambda: now[0])
    silences_s = []
    for beats in (True, False, False, False, True, False):
        now[0] += 1.5
        if beats:
            link.beat()
        silences_s.append(pulse.silent_s())
    assert silences_s == [0, 1.5, 3, 4.5, 0, 1.5]


def test_time_in_which_the_zygote_did_not_run_is_not_held_against_a_rank() -> None:
    link, now = Link(), [1000.0]
    link.expect_beats(20.0)
    pulse = Pulse(link, lambda: now[0])
    now[0] += 3600  # the node was stopped, and so was the rank
    assert pulse.silent_s() == 2 * period_s(20.0)
    now[0] += 0.5
    assert pulse.silent_s() == 2 * period_s(20.0) + 0.5
    link.beat()
    now[0] += 3600  # the zygote alone was stopped
    assert pulse.silent_s() == 0


def test_rank_of_which_no_beats_are_expected_is_never_silent() -> None:
    link, now = Link(), [1000.0]
    pulse = Pulse(link, lambda: now[0])
    for limit_s, silent_s in ((0, 0), (4.0, 0.5), (0, 0), (4.0, 0.5)):
        link.expect_beats(limit_s)
        now[0] += 0.5
        assert pulse.silent_s() == silent_s


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
