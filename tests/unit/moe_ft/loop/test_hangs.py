"""The place of a thread in the code tells whether it waits for others; a rank that hangs says so and ends.

The simulation of repairs has hangs in each section of the loop, and what is none.
"""

import bdb
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from moe_ft.config.config import RecoveryConfig
from moe_ft.events import EventLog
from moe_ft.faults import Phase, Section
from moe_ft.keeper.link import Link, own_link, set_own_link
from moe_ft.loop import hangs
from moe_ft.loop.hangs import (
    Hangs,
    Limits,
    is_debugged,
    stack_of,
    waits_for_others,
    written_bytes,
)
from moe_ft.loop.listeners import LoopState
from tests.unit.fault_tolerance.loops import last_event
from tests.waiting import wait_for

_context = multiprocessing.get_context("fork")
TIMEOUT_S = 600.0
SHORT = timedelta(seconds=2)


@contextmanager
def blocked(act: Callable[[threading.Event], object]) -> Iterator[int]:
    """Have a thread do something that does not return before an event is set."""
    ends = threading.Event()
    thread = threading.Thread(target=act, args=(ends,), daemon=True)
    thread.start()
    ident = thread.ident
    assert ident is not None
    wait_for(lambda: act.__name__ in stack_of(ident), "the thread")
    time.sleep(0.05)  # it may be about to call what it waits in
    try:
        yield ident
    finally:
        ends.set()
        thread.join(60.0)


def in_a_barrier(ends: threading.Event) -> None:
    with suppress(RuntimeError):
        dist.distributed_c10d._store_based_barrier(0, dist.HashStore(), GroupName("g"), 2, SHORT)


def for_what_it_has_begun(ends: threading.Event) -> None:
    with suppress(RuntimeError):
        dist.HashStore().wait(["never"], timedelta(seconds=SHORT.total_seconds()))


def computing(ends: threading.Event) -> None:
    while not ends.is_set():
        sum(range(1000))


def for_another_thread(ends: threading.Event) -> None:
    ends.wait()


def after_a_wait(ends: threading.Event) -> None:
    store = dist.HashStore()
    store.set("it", "is there")
    store.wait(["it"], SHORT)
    while not ends.is_set():
        pow(3, 100000)


@pytest.mark.parametrize(
    ("act", "waits"),
    [
        (in_a_barrier, True),
        (for_what_it_has_begun, True),
        (computing, False),
        (for_another_thread, False),
        (after_a_wait, False),
    ],
)
def test_thread_in_a_call_of_torch_distributed_waits_for_others(
    act: Callable[[threading.Event], None], waits: bool
) -> None:
    with blocked(act) as thread:
        assert waits_for_others(thread) == waits, stack_of(thread)
        assert not is_debugged(thread)


def test_thread_in_a_debugger_is_debugged() -> None:
    def debugged(ends: threading.Event) -> None:
        bdb.Bdb().runcall(ends.wait)

    with blocked(debugged) as thread:
        assert is_debugged(thread)


def test_what_a_child_writes_is_written(tmp_path: Path) -> None:
    has_written, ends = _context.Event(), _context.Event()

    def write() -> None:
        (tmp_path / "file").write_bytes(bytes(1 << 20))
        has_written.set()
        ends.wait()

    before = written_bytes()
    child = _context.Process(target=write)
    child.start()
    assert has_written.wait(60.0)
    assert written_bytes() - before >= 1 << 20
    ends.set()
    child.join()


def loop_at(section: Section, **passes: int) -> LoopState:
    loop = LoopState(section=section, is_first=False)
    loop.num_passes.update({Section[name]: num for name, num in passes.items()})
    return loop


@pytest.mark.parametrize(
    ("loop", "silent_s", "limit_s"),
    [
        (loop_at(Section.SETUP, ITERATION=99), 1.0, 10 * TIMEOUT_S),
        (loop_at(Section.EXIT, ITERATION=99), 1.0, 10 * TIMEOUT_S),
        (loop_at(Section.ITERATION, ITERATION=9), 1.0, TIMEOUT_S),
        (loop_at(Section.ITERATION, ITERATION=10), 1.0, 60.0),
        (loop_at(Section.ITERATION, ITERATION=10), 7.0, 70.0),
        (loop_at(Section.EVALUATION, ITERATION=10), 0.0, TIMEOUT_S),
        (loop_at(Section.EVALUATION, ITERATION=10, EVALUATION=1), 7.0, 70.0),
        (loop_at(Section.CHECKPOINT, ITERATION=10, CHECKPOINT=1), 7.0, 300.0),
        (loop_at(Section.CHECKPOINT, ITERATION=10, CHECKPOINT=1), 90.0, 900.0),
        (loop_at(Section.BETWEEN, ITERATION=10, BETWEEN=9), 1.0, 300.0),
    ],
)
def test_limit_is_ten_times_the_longest_silence_once_a_section_is_known(
    loop: LoopState, silent_s: float, limit_s: float
) -> None:
    limits = Limits(None, TIMEOUT_S, loop)
    limits.learn(loop.section, silent_s)
    limits.learn(loop.section, silent_s / 2)
    assert (limits.of(loop.section), str(limits)) == (limit_s, "auto")
    loop.is_first = True  # again, after a repair
    assert limits.of(loop.section) == max(TIMEOUT_S, limit_s if limit_s > 1000 else 0.0)
    assert Limits(25, TIMEOUT_S, loop).of(loop.section) == 25


def test_silent_rank_says_where_it_is_and_ends(
    event_log: EventLog, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hangs, "LOOK_S", 0.05)
    set_own_link(link := Link())
    loop = LoopState(iteration=4, phase=Phase.BACKWARD)
    watch = Hangs(RecoveryConfig(hang_limit="1"), loop, event_log, TIMEOUT_S)
    pid = os.fork()
    if pid == 0:
        gc.freeze()
        watch.start()
        loop.section = Section.EVALUATION
        watch.enter_section(Section.EVALUATION)
        time.sleep(1000)
    set_own_link(None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    line = last_event(event_log)
    silent_s = line.pop("silent_s")
    assert silent_s >= 1 and link.hung_s == silent_s
    assert line == {
        "event": "hang",
        "iteration": 4,
        "section": "evaluation",
        "phase": "backward",
        "limit_s": 1,
    }
    assert link.section is Section.EVALUATION, "the zygote knows it too"
    said = capfd.readouterr().err
    assert "rank 3 hangs in iteration 4, phase backward, and ends: in its evaluation it" in said
    assert "The limit is 1 s (--moe-ft-hang-limit=1)" in said and "time.sleep(1000)" in said


@pytest.mark.parametrize("given", ["auto", "86400"])
def test_loop_that_tells_no_sections_is_watched_only_with_a_limit(
    given: str, event_log: EventLog
) -> None:
    assert own_link() is None
    watch = Hangs(RecoveryConfig(hang_limit=given), LoopState(), event_log, None)
    watch.start()
    is_watched = "moe_ft-hangs" in {each.name for each in threading.enumerate()}
    watch.enter_section(Section.ITERATION)
    watch.close()
    assert is_watched == (given != "auto")
    assert "moe_ft-hangs" not in {each.name for each in threading.enumerate()}
