"""Observers: the kernel of a node whose processes stand still acknowledges, that of one cut off does not."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from moe_ft.cluster.observer import LOOK_S, Observer
from tests.namespaces import Namespaces, why_none
from tests.waiting import wait_for

RUN, TOKEN = "run", "0123456789abcdef"
LIMIT_S = 0.5
# Another node. It prints its port; when it has a connection to the node that it is told to watch; and, each
# time that this changes, whether it misses that.
OTHER = """
import sys, time
from moe_ft.cluster.observer import Observer
observer = Observer(sys.argv[1], "run", sys.argv[2], float(sys.argv[3]))
observer.open()
print(observer.facts()["watch"][1], flush=True)
if place := sys.stdin.readline().split():
    observer.learn([("there", place[0], int(place[1]))])
is_connected = False
while True:
    if observer.look():
        print(*observer.facts()["missed"], flush=True)
    if not is_connected and any(each._connection for each in observer._probes.values()):
        is_connected = True
        print("connected", flush=True)
    time.sleep(0.02)
"""


def start_other(host: str, *command: str, token: str = TOKEN) -> subprocess.Popen[str]:
    words = [*command, sys.executable, "-c", OTHER, host, token, str(LIMIT_S)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """Another node, of which this process knows nothing yet."""
    process = start_other("127.0.0.1")
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Watch:
    """An observer of this process that watches one address, and how often it was answered."""

    def __init__(self, port: int, token: str = TOKEN) -> None:
        self.observer = Observer("127.0.0.1", RUN, token, LIMIT_S)
        self.observer.learn([("there", "127.0.0.1", port)])
        self.probe = self.observer._probes["there"]
        self.num_knocks = 0

    def look(self) -> list[str]:
        self.observer.look()
        connection = self.probe._connection
        if connection is not None:
            # Each knock is sent once the one before is acknowledged, and has a number.
            self.num_knocks = connection._outgoing._number
        time.sleep(0.02)
        found: list[str] = self.observer.facts()["missed"]
        return found

    def wait_for_knocks(self, number: int) -> None:
        """Wait until so many more knocks are acknowledged; nobody may be missed meanwhile."""
        end = self.num_knocks + number

        def found() -> bool:
            assert self.look() == []
            return self.num_knocks > end

        wait_for(found, "answers of a kernel", poll_s=0)


def test_kernel_of_a_stopped_agent_answers_so_its_node_is_not_missed(
    other: subprocess.Popen[str],
) -> None:
    watch = Watch(int(read_line(other)))
    tell(other, "")
    watch.wait_for_knocks(2)
    os.kill(other.pid, signal.SIGSTOP)
    watch.wait_for_knocks(round(3 * LIMIT_S / LOOK_S))
    os.kill(other.pid, signal.SIGCONT)
    watch.wait_for_knocks(2)


def test_node_whose_agent_has_ended_is_not_missed_and_is_reached_again(
    other: subprocess.Popen[str],
) -> None:
    watch = Watch(int(read_line(other)))
    watch.wait_for_knocks(2)
    other.kill()
    wait_for(lambda: watch.look() or watch.probe._connection is None, "the end", poll_s=0)
    assert watch.look() == []


def test_strangers_are_neither_let_in_nor_watched(other: subprocess.Popen[str]) -> None:
    port = int(read_line(other))
    tell(other, "")
    stranger = Watch(port, token="another token")
    stranger.probe._connect()
    assert stranger.probe._connection is None
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(bytes(1000))
        wait_for(lambda: not _receive(connection), "the end of a connection")


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionError:
        return b""


def test_own_stop_is_held_against_no_node(advance: Callable[[float], None]) -> None:
    class Unanswered:
        def look(self) -> bool:
            return False

    watch = Watch(1)
    watch.observer._probes["there"] = Unanswered()  # type: ignore[assignment]
    advance(100.0)
    assert watch.look() == []
    for _ in range(5):
        advance(100.0)
        watch.look()
    assert watch.look() == ["there"]


def test_node_that_cannot_be_reached_is_not_missed_and_a_line_says_so(
    advance: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    watch = Watch(port)
    for _ in range(40):
        advance(1.0)
        assert watch.look() == []
    said = f"no connection to the agent at 127.0.0.1:{port}: if the power of that node fails"
    assert capsys.readouterr().err.count(said) == 1


def test_nodes_that_are_not_to_be_watched_any_more_are_forgotten() -> None:
    watch = Watch(1)
    watch.observer.learn([])
    assert watch.look() == [] and not watch.observer._probes


@pytest.mark.parametrize("limit_s", [0.0, LIMIT_S])
def test_nobody_watches_where_that_is_turned_off_or_the_system_does_not_tell(
    limit_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    observer = Observer("127.0.0.1", RUN, TOKEN, limit_s)
    observer.open()
    observer.learn([("there", "127.0.0.1", 1)])
    assert not observer._probes and observer.facts() == {"watch": (), "missed": []}
    assert ("this system does not tell" in capsys.readouterr().err) == bool(limit_s)


def test_node_that_is_cut_off_is_missed_until_its_link_is_back() -> None:
    if reason := why_none():
        pytest.skip(reason)
    with Namespaces("one", "two") as networks:
        started = [
            start_other(networks.address(each), *networks.command(each)) for each in ("one", "two")
        ]
        try:
            ports = [read_line(each) for each in started]
            for number, name in enumerate(("two", "one")):
                tell(started[number], f"{networks.address(name)} {ports[1 - number]}")
            assert [read_line(each) for each in started] == ["connected"] * 2
            networks.cut("two")
            assert [read_line(each) for each in started] == ["there", "there"]
            networks.restore("two")
            assert [read_line(each) for each in started] == ["", ""]
        finally:
            for each in started:
                each.kill()
                each.communicate()
