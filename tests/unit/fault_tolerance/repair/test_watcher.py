"""A death or a hang frees the training thread, and begins a repair; a rank that does not leave ends."""

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from megatron.fault_tolerance.repair import watcher as watchers
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.own_errors import OwnErrors
from megatron.fault_tolerance.repair.watcher import Deaths, ending_after
from moe_ft.cluster.member import Member
from moe_ft.cluster.rounds import Entry, RoundMark, Rounds
from moe_ft.files.progress import note_progress, waiting
from moe_ft.loop.listeners import LoopState
from moe_ft.verdicts import Failure, FailureKind
from tests.unit.fault_tolerance.repair.members import Watched
from tests.waiting import wait_for

_TOO_LONG_S = 100  # for a process that is to end: it shows where its threads are
CLOSED = RuntimeError("Connection closed by peer\nand where that was")


class Rank(Watched):
    """Rank 0 of two, in round 0, that can be replaced."""

    def __init__(self, transport: Gloo | None = None) -> None:
        super().__init__(2, transport)
        self.link.arm()
        own = OwnErrors(self.member, self.links, LoopState(), lambda failure, error: None)
        self.deaths = Deaths(self.member, self.watcher, self.links, own)

    def lose_the_other(self) -> None:
        """Have the replacement of rank 1 declare the next round."""
        Rounds(self.store, 1, 2).join_for_dead(Entry(rank=1, died_s=5.0))

    def wait_for_the_end(self) -> None:
        """Wait until the watcher has ended the links."""
        wait_for(lambda: not self.links.is_open, "the end of the connections")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the watcher run."""
        self.watcher.start()
        try:
            yield
        finally:
            self.watcher.close()


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_declared_round_ends_the_connections_of_the_one_before(rank: Rank) -> None:
    with rank.watching():
        before_s = time.time()
        assert rank.watcher.noticed_s(1) >= before_s, "it has noticed nothing"
        rank.lose_the_other()
        rank.wait_for_the_end()
        noticed_s = rank.watcher.noticed_s(1)
        assert noticed_s >= before_s
        assert rank.watcher.noticed_s(1) == noticed_s


def test_store_that_does_not_answer_holds_up_no_end_of_training(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "_CLOSE_S", 0.1)
    is_asked, is_answered = threading.Event(), threading.Event()

    def ask(number: int) -> bool:
        is_asked.set()
        return not is_answered.wait(60.0)

    monkeypatch.setattr(rank.watcher._rounds, "wait_until_broken", ask)
    with rank.watching():
        assert is_asked.wait(60.0)
    assert rank.watcher._thread.is_alive()
    is_answered.set()
    # The next test forks: what this thread holds then, in OpenSSL say, nobody frees in the child.
    rank.watcher._thread.join()


class _Failing(Gloo):
    """A transport on whose links an operation fails that nobody waits for."""

    text = ""

    def failure(self, made: object) -> str:
        return self.text


def test_failure_without_an_exception_has_all_leave_their_iteration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    transport = _Failing()
    rank = Rank(transport)
    with rank.watching():
        transport.text = "NCCL reports TIMEOUT in group 3"
        rank.wait_for_the_end()
    assert rank.member.rounds.has(RoundMark.TIMED_OUT, 1), "the other ranks learn of it"
    assert "NCCL reports TIMEOUT in group 3: all ranks leave" in capsys.readouterr().err


def end_of(act: Callable[[Rank], None], rank: Rank) -> int:
    """Return how a process ends in which the training thread of a rank does something."""
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # what it inherits may have threads, which are not there to be joined
        # Not with a timer of faulthandler: that waits for one of its parent's, which is not there.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=os.dup(2), chain=True)
        signal.alarm(_TOO_LONG_S)
        try:
            act(rank)
            os._exit(7)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_training_thread_that_hangs_ends_its_process_although_nothing_can_be_said(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.1)
    monkeypatch.setattr(watchers, "LAST_WORDS_S", 0.5)

    def hang(rank: Rank) -> None:
        os.dup2(os.pipe()[1], 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        with rank.watcher.inside():
            rank.watcher.start()
            sys.stderr.write("x" * (1 << 20))  # which nobody reads

    rank.lose_the_other()
    assert end_of(hang, rank) == 1
    assert rank.link.hung_s > 0.1


@pytest.mark.parametrize(("excused_s", "at_least_s"), [(None, 0.1), (0.2, 0.3)])
def test_training_thread_that_does_not_leave_its_iteration_ends_the_process_and_is_shown(
    excused_s: float | None,
    at_least_s: float,
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.1)

    def hang(rank: Rank) -> None:
        with rank.watcher.inside():
            rank.watcher.start()
            if excused_s is None:
                time.sleep(1000)
            with waiting(excused_s or 0.0):
                time.sleep(1000)

    rank.lose_the_other()
    assert end_of(hang, rank) == -signal.SIGKILL
    assert rank.link.hung_s > at_least_s
    assert f'{__file__}", line ' in capfd.readouterr().err


def test_training_thread_that_waits_for_something_else_has_the_time_of_that(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.3)

    def wait(rank: Rank) -> None:
        with rank.watcher.inside():
            rank.watcher.start()
            rank.wait_for_the_end()
            with waiting(1000.0):
                time.sleep(0.6)
            os.write(2, b"it has its copy")

    rank.lose_the_other()
    assert end_of(wait, rank) == 7
    assert rank.link.hung_s == 0


def test_training_thread_that_gets_further_in_a_recovery_has_time(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.5)

    def read(rank: Rank) -> None:
        with rank.watcher.inside():
            rank.watcher.start()
            rank.wait_for_the_end()
            begin_s = time.monotonic()
            while time.monotonic() - begin_s < 1.5:
                note_progress()
                time.sleep(0.01)
            os.write(2, b"it has its state")

    rank.lose_the_other()
    assert end_of(read, rank) == 7
    assert rank.link.hung_s == 0


def test_training_thread_that_has_left_its_iteration_may_take_its_time(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.01)

    def leave(rank: Rank) -> None:
        rank.watcher.start()
        rank.wait_for_the_end()
        time.sleep(0.2)
        with rank.watcher.inside():  # the next round has not begun: it fails by itself
            time.sleep(0.2)

    rank.lose_the_other()
    assert end_of(leave, rank) == 7
    assert rank.link.hung_s == 0


def test_death_that_is_known_begins_a_repair_and_ends_the_connections(
    rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    rank.lose_the_other()
    before_s = time.time()
    assert before_s <= (rank.deaths.notice(CLOSED) or 0) <= time.time()
    assert not rank.links.is_open and rank.link.is_armed
    assert capfd.readouterr().err == (
        "WARNING moe_ft: rank 0 has left its iteration: a rank has died (Connection closed by peer)\n"
    )


def test_device_that_fails_for_good_is_reported_before_the_process_ends(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[Failure | str]()
    monkeypatch.setattr(Member, "report_failure", lambda self, failure: told.append(failure))
    monkeypatch.setattr(watchers, "end_process", told.append)
    lost = RuntimeError("NCCL error: Cuda failure 700 'an illegal memory access was encountered'")
    rank.lose_the_other()
    rank.deaths.notice_or_raise(lost)
    failure, reason = told
    assert isinstance(failure, Failure) and (failure.rank, failure.kind) == (0, FailureKind.DEVICE)
    assert failure.what == reason == "an illegal memory access was encountered"


def test_no_news_are_awaited_after_an_exception_that_no_death_explains(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "_NOTICE_S", 3600.0)
    assert rank.deaths.notice(ValueError("a mistake")) is None
    rank.lose_the_other()
    assert rank.deaths.notice(ValueError("a mistake")) is not None, "it is known"


@pytest.mark.parametrize("error", [CLOSED, KeyboardInterrupt()])
def test_exception_without_a_death_is_raised_and_the_rank_is_not_replaced(
    rank: Rank, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "_NOTICE_S", 0.02)
    with pytest.raises(type(error)):
        rank.deaths.notice_or_raise(error)
    assert not rank.link.is_armed


def test_exit_of_the_process_is_no_repair_even_if_a_rank_has_died(rank: Rank) -> None:
    rank.lose_the_other()
    with pytest.raises(SystemExit):
        rank.deaths.notice_or_raise(SystemExit(3))
    assert not rank.link.is_armed


def test_process_ends_for_good_if_a_repair_gets_no_further(rank: Rank) -> None:
    reader, writer = os.pipe()

    def repair(rank: Rank) -> None:
        begin_s = time.monotonic()
        with ending_after(1.0, rank.link):
            while time.monotonic() - begin_s < 2.5:
                note_progress()
                time.sleep(0.05)
            os.write(writer, b"later")
            signal.pause()

    assert end_of(repair, rank) == 1
    os.close(writer)
    assert os.read(reader, 5) == b"later", "it may take longer while it makes progress"
    os.close(reader)
    assert not rank.link.is_armed, "or the fork server would replace it"
