"""A rank's side of storage: asking, giving up, and keeping a writer alive."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from moe_ft.engine.background import Report, Reports
from moe_ft.engine.persist import (
    PersistClient,
    WriterSupervisor,
    persist_deadline_s,
    writer_command,
)
from moe_ft.engine.persist_worker import HEARTBEAT_NAME, PersistRequest, request_path, result_path
from moe_ft.engine.regions import Region
from moe_ft.engine.storage import Storage, file_tag
from moe_ft.faults import Phase
from tests.unit.moe_ft.builders import complete_iterations, fill_region, make_identity
from tests.waiting import wait_for

TAG = file_tag(make_identity())


def no_fault(phase: Phase, iteration: int) -> None:
    """Inflict nothing."""


class Node:
    """The directory of a node's writer, its supervisor and a client."""

    def __init__(self, tmp_path: Path, command: list[str] | None = None) -> None:
        self.directory, self.url = tmp_path / "persist", str(tmp_path / "storage")
        self.reports = Reports()
        self.seen: list[Report] = []
        parent = psutil.Process().pid
        self.supervisor = WriterSupervisor(
            self.directory,
            command or writer_command(self.directory, self.url, 2, parent, "job", "run-a", False),
            self.reports,
        )
        self.client = PersistClient(self.directory, 0, self.reports, no_fault)
        self.client.start()

    def writer(self) -> psutil.Process | None:
        """Return the writer once it serves."""
        if not (self.directory / HEARTBEAT_NAME).exists():
            return None
        for child in psutil.Process().children():
            if str(self.directory) in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                return child
        return None

    def reason(self, text: str) -> str | None:
        """Return the reason of a degraded report that contains a text, once there is one."""
        self.seen += self.reports.drain()
        reasons = (each.fields["reason"] for each in self.seen if each.event == "degraded")
        return next((reason for reason in reasons if text in reason), None)

    def persist(self, region: Region) -> Report:
        """Have a region written, and return what is reported at the end."""
        self.client.submit(region, [], "", TAG)
        wait_for(self.client.poll, "the region to come back")
        return self.reports.drain()[-1]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.supervisor.close()


def test_request_says_what_is_written_and_where_the_rest_is(tmp_path: Path, node: Node) -> None:
    region, _ = fill_region(tmp_path / "rank")
    node.client.submit(region, ["layer.9.expert.0"], "iter_0000001/rank_00000_a.json", TAG)
    content = request_path(node.directory, 0).read_bytes()
    request = msgspec.json.decode(content, type=PersistRequest)
    assert (request.rank, request.iteration, request.writes_manifest) == (0, 5, True)
    assert (request.rotating, request.tag) == (("layer.9.expert.0",), TAG)
    assert request.previous == "iter_0000001/rank_00000_a.json"


def test_region_that_is_submitted_comes_back_with_a_report(tmp_path: Path, node: Node) -> None:
    region, index = fill_region(tmp_path / "rank")
    node.supervisor.start()
    report = node.persist(region)
    assert (report.event, report.iteration) == ("persist", 5)
    assert (report.fields["bytes"], report.fields["path"]) == (index.file_bytes, node.url)
    assert complete_iterations(Storage(node.url)) == [5]


def test_region_that_cannot_be_written_comes_back_degraded(tmp_path: Path, node: Node) -> None:
    region, index = fill_region(tmp_path / "rank")
    region.mapping[index.units["embedding"].offset] ^= 1
    node.supervisor.start()
    report = node.persist(region)
    assert (report.event, report.fields["part"]) == ("degraded", "persist")
    assert "does not match its checksum" in report.fields["reason"]


def test_writer_that_is_killed_is_started_again_and_serves(tmp_path: Path, node: Node) -> None:
    node.supervisor.start()
    first = wait_for(node.writer, "the writer")
    first.kill()
    reason = wait_for(lambda: node.reason("ended with code"), "the report")
    assert reason == "the writer process ended with code -9; it is started again"
    region, _ = fill_region(tmp_path / "rank")
    assert node.persist(region).event == "persist"


def test_request_whose_writer_was_killed_is_served_by_the_next(tmp_path: Path, node: Node) -> None:
    node.supervisor.start()
    first = wait_for(node.writer, "the writer")
    first.suspend()
    region, _ = fill_region(tmp_path / "rank")
    node.client.submit(region, [], "", TAG)
    first.kill()
    assert wait_for(node.client.poll, "the region to come back") is region
    assert complete_iterations(Storage(node.url)) == [5]


def test_writer_that_falls_silent_is_killed_and_started_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.supervisor.start()
    first = wait_for(node.writer, "the writer")
    first.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("moe_ft.engine.persist._HEARTBEAT_STALE_S", 2.0)
    wait_for(lambda: node.reason("no sign of life"), "the report")
    monkeypatch.undo()
    second = wait_for(node.writer, "another writer")
    assert second.pid != first.pid


def test_writer_that_cannot_start_is_tried_less_often_after_some_attempts(tmp_path: Path) -> None:
    node = Node(tmp_path, ["/no/such/program"])
    node.supervisor.start()
    wait_for(lambda: node.reason("it is started again in 60 s"), "the last report")
    assert all("cannot start" in each.fields["reason"] for each in node.seen)
    node.supervisor.close()


def test_writer_that_always_fails_is_tried_less_often_after_some_attempts(tmp_path: Path) -> None:
    node = Node(tmp_path, [sys.executable, "-S", "-c", "raise SystemExit(3)"])
    node.supervisor.start()
    reason = wait_for(lambda: node.reason("it is started again in 60 s"), "the last report")
    assert "ended with code 3" in reason
    node.supervisor.close()


def test_writer_of_a_supervisor_that_was_closed_is_gone(node: Node) -> None:
    node.supervisor.start()
    writer = wait_for(node.writer, "the writer")
    node.supervisor.close()
    assert not writer.is_running()
    assert node.reason("") is None


def test_supervisor_that_was_never_started_can_be_closed(node: Node) -> None:
    node.supervisor.close()


def test_region_of_a_writer_that_does_not_answer_comes_back_degraded(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.engine.persist._MIN_DEADLINE_S", -1e6)
    region, _ = fill_region(tmp_path / "rank")
    node.client.submit(region, [], "", TAG)
    assert node.client.poll() is region
    assert node.reason("the writer did not finish in time") is not None
    assert not request_path(node.directory, 0).exists()


def test_writer_that_may_still_read_a_region_that_was_given_up_is_replaced(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.supervisor.start()
    first = wait_for(node.writer, "the writer")
    first.suspend()
    monkeypatch.setattr("moe_ft.engine.persist._MIN_DEADLINE_S", -1e6)
    region, _ = fill_region(tmp_path / "rank")
    node.client.submit(region, [], "", TAG)
    node.client.poll()
    wait_for(lambda: node.reason("did not finish in time and was killed"), "the report")
    assert wait_for(node.writer, "another writer").pid != first.pid


def test_request_that_cannot_be_written_is_reported_and_the_region_comes_back(
    tmp_path: Path, node: Node
) -> None:
    region, _ = fill_region(tmp_path / "rank")
    node.directory.rmdir()
    node.client.submit(region, [], "", TAG)
    assert node.client.poll() is region
    assert node.reason("cannot ask the writer") is not None


def test_requests_and_results_of_an_earlier_start_are_forgotten(node: Node) -> None:
    paths = [request_path(node.directory, 0), result_path(node.directory, 0)]
    for path in paths:
        path.write_bytes(b"{}")
    node.client.start()
    assert not any(path.exists() for path in paths)


@pytest.mark.parametrize("content", [b"", b"{}", b"half a res"])
def test_result_that_cannot_be_understood_is_no_result(
    tmp_path: Path, node: Node, content: bytes
) -> None:
    region, _ = fill_region(tmp_path / "rank")
    node.client.submit(region, [], "", TAG)
    result_path(node.directory, 0).write_bytes(content)
    assert node.client.poll() is None


def test_client_that_asked_for_nothing_gets_nothing(node: Node) -> None:
    assert node.client.poll() is None


def test_deadline_of_more_bytes_is_later() -> None:
    assert persist_deadline_s(10**12) > persist_deadline_s(10**9) > persist_deadline_s(0) > 0
