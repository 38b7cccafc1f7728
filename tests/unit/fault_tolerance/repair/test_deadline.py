"""A process that gets no further in a repair ends for good."""

import os
import signal
import threading
import time

from megatron.fault_tolerance.repair.deadline import ending_after
from moe_ft.files.patience import note_progress
from moe_ft.keeper.link import Link


def test_process_ends_for_good_if_a_repair_gets_no_further() -> None:
    link = Link()
    pid = os.fork()
    if pid == 0:
        link.arm()
        with ending_after(0.05, link):
            signal.pause()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert not link.is_armed, "or the zygote would replace it"


def test_process_that_makes_progress_may_take_longer_until_it_makes_none() -> None:
    link = Link()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        link.arm()
        begin_s = time.monotonic()
        with ending_after(1.0, link):
            while time.monotonic() - begin_s < 2.5:
                note_progress()
                time.sleep(0.05)
            os.write(writer, b"later")
            signal.pause()
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 5) == b"later"
    os.close(reader)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_process_lives_on_if_a_repair_ends_in_time() -> None:
    link = Link()
    pid = os.fork()
    if pid == 0:
        before = threading.active_count()
        signal.alarm(60)
        link.arm()
        with ending_after(0.05, link):
            pass
        os._exit(0 if threading.active_count() == before else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert link.is_armed
