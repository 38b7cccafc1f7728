"""A process that misses the deadline of a repair ends for good."""

import os
import signal
import threading

from megatron.fault_tolerance.repair.deadline import ending_after
from moe_ft.keeper.link import Link


def test_process_ends_for_good_if_a_repair_takes_too_long() -> None:
    link = Link()
    pid = os.fork()
    if pid == 0:
        link.arm()
        with ending_after(0.05, link):
            signal.pause()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert not link.is_armed, "or the zygote would replace it"


def test_process_lives_on_if_a_repair_ends_in_time() -> None:
    link = Link()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        link.arm()
        with ending_after(0.05, link):
            (timer,) = (each for each in threading.enumerate() if isinstance(each, threading.Timer))
        timer.join()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert link.is_armed
