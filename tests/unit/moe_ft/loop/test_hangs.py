"""The place of a thread in the code tells whether it waits for others; a rank that hangs says so and ends.

The simulation of repairs has hangs in each section of the loop, and what is none.
"""

import _thread
import bdb
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from moe_ft.cluster.job_store import wait_for_listener
from moe_ft.cluster.member import become_member, own_member
from moe_ft.cluster.rounds import Entry, Rounds
from moe_ft.config.config import RecoveryConfig
from moe_ft.errors import RepairError
from moe_ft.events import EventLog
from moe_ft.faults import Phase, Section
from moe_ft.files.progress import awaits_others
from moe_ft.loop import hangs
from moe_ft.loop.hangs import (
    Hangs,
    Limits,
    Silence,
    is_debugged,
    written_bytes,
)
from moe_ft.loop.listeners import Listeners, LoopState
from moe_ft.loop.waits import is_in_exchange, stack_of
from tests.device.process import late_process
from tests.unit.fault_tolerance.loops import last_event
from tests.unit.signed import member_of, signed
from tests.waiting import wait_for

_context = multiprocessing.get_context("fork")
TIMEOUT_S = 600.0
LONG = timedelta(seconds=60)


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


def store_that_gets(key: str, ends: threading.Event) -> dist.HashStore:
    """Return a store that has a key when the event is set."""
    store = dist.HashStore()

    def put() -> None:
        ends.wait()
        store.set(key, "")

    threading.Thread(target=put, daemon=True).start()
    return store


def in_a_barrier(ends: threading.Event) -> None:
    torchs = dist.distributed_c10d
    key = f"{torchs.STORE_BASED_BARRIER_PREFIX}:g:last_worker"
    torchs._store_based_barrier(0, store_that_gets(key, ends), GroupName("g"), 2, LONG)


def for_what_it_has_begun(ends: threading.Event) -> None:
    store_that_gets("it", ends).wait(["it"], timedelta(seconds=LONG.total_seconds()))


def computing(ends: threading.Event) -> None:
    while not ends.is_set():
        sum(range(1000))


def for_another_thread(ends: threading.Event) -> None:
    ends.wait()


def after_a_wait(ends: threading.Event) -> None:
    store = dist.HashStore()
    store.set("it", "is there")
    store.wait(["it"], LONG)
    while not ends.is_set():
        pow(3, 100000)


def in_file(name: str, ends: threading.Event, act: Callable[[], object]) -> Callable[[], None]:
    """Return a function of a file of some package that calls another one until the event is set."""
    source = "def calls():\n    while not ends._flag:\n        act()"
    names: dict[str, Any] = {"ends": ends, "act": act}
    exec(compile(source, f"/packages/{name}", "exec"), names)
    return cast(Callable[[], None], names["calls"])


def for_tokens(ends: threading.Event) -> None:
    in_file("deep_ep/buffer.py", ends, partial(time.sleep, 0.01))()


def for_tokens_in_a_wrapper(ends: threading.Event) -> None:
    of_torch = in_file("torch/_ops.py", ends, partial(time.sleep, 0.01))
    in_file("deep_ep/hybrid_ep_buffer.py", ends, of_torch)()


def in_a_layer(ends: threading.Event) -> None:
    layer = in_file("layer.py", ends, partial(time.sleep, 0.01))
    in_file("megatron/core/transformer/moe/fused_a2a.py", ends, layer)()


def backward(ends: threading.Event, name: str) -> None:
    """Wait as a training thread does for a backward pass on a GPU, which is in a file of some package."""
    inner = in_file(name, ends, partial(time.sleep, 0.01))
    _thread.start_new_thread(in_file("torch/autograd/function.py", ends, inner), ())
    in_file("torch/autograd/graph.py", ends, partial(time.sleep, 0.01))()


def for_tokens_in_backward(ends: threading.Event) -> None:
    backward(ends, "deep_ep/buffer.py")


def in_a_layer_in_backward(ends: threading.Event) -> None:
    backward(ends, "layer.py")


@pytest.mark.parametrize(
    ("act", "waits"),
    [
        (in_a_barrier, True),
        (for_what_it_has_begun, True),
        (computing, False),
        (for_tokens, True),
        (for_tokens_in_a_wrapper, True),
        (for_tokens_in_backward, True),
        (in_a_layer, False),
        (in_a_layer_in_backward, False),
        (for_another_thread, False),
        (after_a_wait, False),
    ],
)
def test_thread_in_an_exchange_waits_for_others(
    act: Callable[[threading.Event], None], waits: bool
) -> None:
    with blocked(act) as thread:
        wait_for(lambda: is_in_exchange(thread) or not waits, "a thread that it starts")
        assert is_in_exchange(thread) == waits, stack_of(thread)
        assert not is_debugged(thread)


def test_thread_that_polls_the_store_for_other_ranks_awaits_them() -> None:
    rounds = Rounds(signed(), 0, 2)

    def polls(ends: threading.Event) -> None:
        with suppress(RepairError):
            rounds.wait_for_all(1, LONG.total_seconds())

    with blocked(polls) as thread:
        assert awaits_others(thread)
        rounds.join(2, Entry(rank=0, died_s=1.0))  # breaks the round that it waits in
        wait_for(lambda: not awaits_others(thread), "the end of the wait")


def test_thread_that_waits_for_the_store_to_listen_awaits_others() -> None:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))  # and does not listen yet

        def connects(ends: threading.Event) -> None:
            wait_for_listener(place.getsockname(), LONG.total_seconds())

        with blocked(connects) as thread:
            assert awaits_others(thread)
            place.listen()
            wait_for(lambda: not awaits_others(thread), "the end of the wait")


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


def trained(num_iterations: int) -> LoopState:
    """Return the state of a loop that is between two iterations."""
    listeners = Listeners(LoopState(), [])
    for iteration in range(num_iterations):
        listeners.begin_iteration(iteration)
        listeners.end_iteration({}, is_skipped=False, num_samples=1)
    return listeners.loop


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
        (trained(1), 1.0, TIMEOUT_S),
        (trained(10), 1.0, 300.0),
        (trained(10), 40.0, 400.0),
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


def write(path: Path, text: str) -> None:
    path.write_text(text)


def test_silent_rank_says_where_it_is_and_ends(
    event_log: EventLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hangs, "LOOK_S", 0.05)
    become_member(member := member_of())
    loop = LoopState(iteration=4, phase=Phase.BACKWARD)
    told = tmp_path / "told"
    watch = Hangs(
        RecoveryConfig(hang_limit="1"), loop, event_log, TIMEOUT_S, lambda what: write(told, what)
    )
    pid = os.fork()
    if pid == 0:
        gc.freeze()
        watch.start()
        loop.section = Section.EVALUATION
        watch.enter_section(Section.EVALUATION)
        time.sleep(1000)
    become_member(None)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    line = last_event(event_log)
    silent_s = line.pop("silent_s")
    assert silent_s >= 1 and member.link.hung_s == silent_s
    assert line == {
        "event": "hang",
        "iteration": 4,
        "section": "evaluation",
        "phase": "backward",
        "limit_s": 1,
    }
    assert told.read_text() == "no progress in its evaluation, and it waits for no other rank"
    assert member.link.section is Section.EVALUATION, "the fork server knows it too"
    said = capfd.readouterr().err
    assert "rank 3 hangs in iteration 4, phase backward, and ends: in its evaluation it" in said
    assert "The limit is 1 s (--moe-ft-hang-limit=1)" in said and f'{__file__}", line ' in said


def test_look_that_fails_ends_no_watch_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hangs, "LOOK_S", 0.0)
    loop = loop_at(Section.ITERATION)
    answers: Iterator[bool | Exception] = iter(
        [OSError(24, "no descriptor"), RuntimeError(), False]
    )

    def waits() -> bool:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    silence = Silence(0, loop, Limits(5.0, TIMEOUT_S, loop), waits)
    time.sleep(0.01)
    assert (silence.look(), silence.look()) == (0.0, 0.0), "who cannot see it blames nobody"
    time.sleep(0.01)
    assert silence.look() > 0.0
    said = capsys.readouterr().err
    assert said.count("cannot be seen") == 1 and "OSError: [Errno 24] no descriptor" in said


@pytest.mark.parametrize("impl", [None, "none", "transformer_engine"])
def test_device_that_captures_graphs_is_not_asked_and_no_limit_is_learned(
    impl: str | None, event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    weight = SimpleNamespace(is_cuda=True, device="cuda:0")
    config = SimpleNamespace(cuda_graph_impl=impl)
    model = [SimpleNamespace(config=config, parameters=lambda: iter([weight]))]
    is_graph = impl == "transformer_engine"
    loop = loop_at(Section.ITERATION, ITERATION=10)
    for given, limit_s in ("auto", 60.0), ("25", 25.0):
        watch = Hangs(RecoveryConfig(hang_limit=given), loop, event_log, TIMEOUT_S)
        watch.after_setup((model, None, None))
        assert watch._stream == (None if is_graph else "stream of cuda:0")
        assert watch._limits.of(loop.section) == (TIMEOUT_S if is_graph else limit_s)


def test_watching_thread_asks_the_device_of_the_training_thread(event_log: EventLog) -> None:
    with late_process("hangs") as device, ThreadPoolExecutor(1) as watcher:
        watch = Hangs(RecoveryConfig(), loop_at(Section.ITERATION), event_log, TIMEOUT_S)
        weight = torch.ones(1, device="cuda")
        model = [SimpleNamespace(parameters=lambda: iter([weight]))]
        watch.after_setup((model, None, None))
        watcher.submit(watch._waits).result()
        assert device.conflicts == []


def _full_pipe(log: EventLog) -> None:
    """Be in a write to a stream that nobody reads; others who write to it wait for that."""
    os.dup2(os.pipe()[1], 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.stderr.write("x" * (1 << 20))


def _silent_storage(log: EventLog) -> None:
    """Be in a write to the event log, whose storage does not answer."""
    with log._lock:
        signal.pause()


@pytest.mark.parametrize("hang", [_full_pipe, _silent_storage])
def test_silent_rank_ends_although_what_it_says_waits_for_what_hangs(
    hang: Callable[[EventLog], None], event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "LOOK_S", 0.05)
    monkeypatch.setattr(hangs, "LAST_WORDS_S", 0.5)
    watch = Hangs(RecoveryConfig(hang_limit="1"), LoopState(), event_log, TIMEOUT_S)
    pid = os.fork()
    if pid == 0:
        gc.freeze()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        try:
            watch.start()
            hang(event_log)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.mark.parametrize("given", ["auto", "86400"])
def test_loop_that_tells_no_sections_is_watched_only_with_a_limit(
    given: str, event_log: EventLog
) -> None:
    assert own_member() is None
    watch = Hangs(RecoveryConfig(hang_limit=given), LoopState(), event_log, None)
    watch.start()
    is_watched = "moe_ft-hangs" in {each.name for each in threading.enumerate()}
    watch.enter_section(Section.ITERATION)
    watch.close()
    assert is_watched == (given != "auto")
    assert "moe_ft-hangs" not in {each.name for each in threading.enumerate()}
