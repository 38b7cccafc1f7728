"""The watcher ends the connections of the present round when the next one is declared, and stuck ranks."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from megatron.fault_tolerance.repair import watcher as watchers
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.transport import Made, Maker
from megatron.fault_tolerance.repair.watcher import Watcher
from moe_ft.files.patience import waiting
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Rounds, declare
from tests.unit.signed import signed
from tests.waiting import wait_for


def test_declared_round_ends_the_connections_of_the_one_before() -> None:
    store, links = signed(), Links()
    watcher = Watcher(Rounds(store, 0, 2), links, Link())
    watcher.start()
    try:
        before_s = time.time()
        assert watcher.noticed_s(1) >= before_s, "it has noticed nothing"
        declare(store, rank=1, world_size=2, died_s=before_s)
        wait_for(lambda: not links.is_open, "the end of the connections")
        noticed_s = watcher.noticed_s(1)
        assert noticed_s >= before_s
        assert watcher.noticed_s(1) == noticed_s
        links.begin(1)
        Rounds(store, 0, 2).finish(1)
        assert links.is_open
        declare(store, rank=0, world_size=2, died_s=before_s)
        wait_for(lambda: not links.is_open, "the end of the connections of round 1")
    finally:
        watcher.close()


def test_rank_that_timed_out_has_all_leave_their_iteration() -> None:
    store, links = signed(), Links()
    watcher = Watcher(Rounds(store, 0, 2), links, Link())
    watcher.start()
    try:
        Rounds(store, 0, 2).time_out(1)
        wait_for(lambda: not links.is_open, "the end of the connections")
    finally:
        watcher.close()


class _Failing:
    """A transport on whose links an operation fails that nobody waits for."""

    name, fails_silently, text = "failing", True, ""

    def mark(self) -> None: ...
    def settle(self) -> None: ...
    def leave(self) -> None: ...
    def maker(self) -> Maker:
        raise NotImplementedError

    def made_since(self, mark: None) -> dict[str, str]:
        return {}

    def end(self, made: Made) -> int:
        return 0

    def failure(self, made: Made) -> str:
        return self.text


def test_failure_without_an_exception_has_all_leave_their_iteration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, transport = signed(), _Failing()
    links = Links((transport,))
    watcher = Watcher(Rounds(store, 0, 2), links, Link())
    watcher.start()
    try:
        transport.text = "NCCL reports TIMEOUT in group 3"
        wait_for(lambda: not links.is_open, "the end of the links")
        assert Rounds(store, 0, 2).has_timed_out(1), "the other ranks learn of it"
        assert "NCCL reports TIMEOUT in group 3: all ranks leave" in capsys.readouterr().err
    finally:
        watcher.close()


def end_of(training: Callable[[Watcher, Links], None], link: Link) -> int:
    """Return how a process ends whose connections end while its training thread does something."""
    pid = os.fork()
    if pid == 0:
        store, links = signed(), Links()
        watcher = Watcher(Rounds(store, 0, 2), links, link)
        declare(store, rank=1, world_size=2, died_s=5.0)
        training(watcher, links)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_training_thread_that_does_not_leave_its_iteration_ends_the_process_and_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.1)
    link = Link()

    def hang(watcher: Watcher, links: Links) -> None:
        with watcher.inside():
            watcher.start()
            time.sleep(1000)

    assert end_of(hang, link) == -signal.SIGKILL
    assert link.hung_s > 0.1
    assert "time.sleep(1000)" in capfd.readouterr().err


def test_training_thread_that_waits_for_something_else_has_the_time_of_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.3)
    link = Link()

    def wait(watcher: Watcher, links: Links) -> None:
        with watcher.inside():
            watcher.start()
            wait_for(lambda: not links.is_open, "the end of the connections")
            with waiting(1000.0):
                time.sleep(0.6)
            os.write(2, b"it has its copy")

    assert end_of(wait, link) == 7
    assert link.hung_s == 0


def test_training_thread_that_waits_for_something_else_in_vain_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.1)
    link = Link()

    def hang(watcher: Watcher, links: Links) -> None:
        with watcher.inside():
            watcher.start()
            with waiting(0.2):
                time.sleep(1000)

    assert end_of(hang, link) == -signal.SIGKILL
    assert link.hung_s > 0.3


def test_training_thread_that_has_left_its_iteration_may_take_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchers, "STUCK_S", 0.01)
    link = Link()

    def leave(watcher: Watcher, links: Links) -> None:
        watcher.start()
        wait_for(lambda: not links.is_open, "the end of the connections")
        time.sleep(0.2)
        with watcher.inside():  # the next round has not begun: it fails by itself
            time.sleep(0.2)

    assert end_of(leave, link) == 7
    assert link.hung_s == 0
