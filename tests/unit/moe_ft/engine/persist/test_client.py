"""A rank's side of storage: asking, giving up, and keeping a writer alive."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

import moe_ft
from moe_ft import processes
from moe_ft.engine.background import EngineEvent, EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.client import (
    PersistClient,
    WriterSupervisor,
    persist_deadline_s,
    writer_command,
)
from moe_ft.engine.persist.requests import (
    PersistRequest,
    PersistResult,
    WriterSettings,
    request_path,
    result_path,
)
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.engine.persist.writer import HEARTBEAT_NAME
from moe_ft.faults import Phase
from moe_ft.files.storage import Storage, file_tag
from tests.unit.moe_ft.builders import fill_region, make_identity
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.waiting import wait_for

TAG = file_tag(make_identity())


def no_fault(phase: Phase, iteration: int) -> None:
    """Inflict nothing."""


class Node:
    """The directory of a node's writer, its supervisor and a client."""

    def __init__(
        self, tmp_path: Path, command: list[str] | None = None, lock_owner: str = ""
    ) -> None:
        self.directory, self.url = tmp_path / "persist", str(tmp_path / "storage")
        self.reports = EventQueue()
        self.seen: list[EngineEvent] = []
        settings = WriterSettings(url=self.url, keep=2, parent=os.getpid(), lock_owner=lock_owner)
        command = command or writer_command(self.directory)
        self.supervisor = WriterSupervisor(self.directory, command, self.reports, Clock(), settings)
        self.client = PersistClient(self.directory, 0, self.reports, no_fault, Clock())
        self.client.start()

    def writer(self) -> psutil.Process | None:
        """Return the writer once it serves."""
        if not (self.directory / HEARTBEAT_NAME).exists():
            return None
        for child in psutil.Process().children():
            # One that was just killed, or that another test of this process has left, has no command line.
            with suppress(psutil.NoSuchProcess):
                if str(self.directory) in child.cmdline():
                    return child
        return None

    def reason(self, text: str) -> str | None:
        """Return the reason of a degraded report that contains a text, once there is one."""
        self.seen += self.reports.drain()
        reasons = (each.fields["reason"] for each in self.seen if each.event == "degraded")
        return next((reason for reason in reasons if text in reason), None)

    def persist(self, region: Region) -> EngineEvent:
        """Have a region written, and return what is reported at the end."""
        self.client.submit(region, [], "", TAG)
        wait_for(self.client.poll, "the region to come back")
        return self.reports.drain()[-1]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no writer for dead that only has a low priority on a busy machine."""
    for name in ("_HEARTBEAT_STALE_S", "_START_S"):
        monkeypatch.setattr(f"moe_ft.engine.persist.client.{name}", 100.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.supervisor.close()


def test_writer_that_is_killed_is_started_again_and_serves(tmp_path: Path, node: Node) -> None:
    node.supervisor.start()
    first = wait_for(node.writer, "the writer")
    first.kill()
    reason = wait_for(lambda: node.reason("ended with code"), "the report")
    assert reason == "the writer process ended with code -9; it is started again"
    region, _ = fill_region(tmp_path / "rank")
    assert node.persist(region).event == "read_back"


def test_writer_that_falls_silent_is_killed_and_started_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.supervisor.start()
    first = wait_for(node.writer, "the writer")
    first.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("moe_ft.engine.persist.client._HEARTBEAT_STALE_S", 2.0)
    wait_for(lambda: node.reason("no sign of life"), "the report")
    monkeypatch.undo()
    second = wait_for(node.writer, "another writer")
    assert second.pid != first.pid


def test_writer_imports_nothing_from_the_working_directory(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "filelock.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    node.supervisor.start()
    wait_for(node.writer, "the writer")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("is_on_path", [False, True])
def test_writer_runs_the_package_of_its_parent_and_no_neighbour_of_it(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch, is_on_path: bool
) -> None:
    checkout, marker = tmp_path / "checkout", tmp_path / "imported"
    shutil.copytree(Path(moe_ft.__file__).parent, checkout / "moe_ft")
    (checkout / "moe_ft" / "__init__.py").write_text(f"open({str(marker)!r}, 'w')")
    if is_on_path:
        monkeypatch.setenv("PYTHONPATH", str(checkout))
    else:
        (checkout / "filelock.py").write_text("raise ImportError")
    monkeypatch.setattr(processes, "_CODE", checkout)
    node.supervisor._command[:] = writer_command(node.directory)
    node.supervisor.start()
    wait_for(node.writer, "the writer")
    assert marker.exists()


def test_writer_gets_what_may_be_secret_neither_by_arguments_nor_by_files(node: Node) -> None:
    node.supervisor.start()
    writer = wait_for(node.writer, "the writer")
    assert not any(node.url in word for word in writer.cmdline())
    assert not any(node.url in value for value in writer.environ().values())
    contents = [path.read_bytes() for path in node.directory.iterdir()]
    assert not any(node.url.encode() in content for content in contents)


def test_writer_whose_lock_is_lost_reports_that_it_is_degraded(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "storage"))
    storage.make_root()
    zombie, present = StorageLock(storage), StorageLock(storage)
    assert zombie.take("job", None)
    node = Node(tmp_path, lock_owner=zombie.owner)
    node.supervisor.start()
    assert present.take("job", zombie.look())
    region, _ = fill_region(tmp_path / "rank")
    report = node.persist(region)
    assert (report.event, report.fields["part"]) == ("degraded", "persist")
    assert "LockLostError: moe_ft.lock" in report.fields["reason"]
    assert complete_iterations(storage) == []
    node.supervisor.close()


def test_writer_that_cannot_start_is_tried_less_often_after_some_attempts(tmp_path: Path) -> None:
    node = Node(tmp_path, ["/no/such/program"])
    node.supervisor.start()
    wait_for(lambda: node.reason("it is started again in 60 s"), "the last report")
    assert all("cannot start" in each.fields["reason"] for each in node.seen)
    node.supervisor.close()


def test_writer_that_may_still_read_a_region_that_was_given_up_is_replaced(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.supervisor.start()
    first = wait_for(node.writer, "the writer")
    first.suspend()
    monkeypatch.setattr("moe_ft.engine.persist.client._MIN_DEADLINE_S", -1e6)
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
    assert node.client.poll()
    assert node.reason("cannot ask the writer") is not None


@pytest.mark.parametrize(("rank", "num_ranks_counted"), [(0, 3000), (1, 0)])
def test_request_of_the_rank_that_writes_the_manifest_may_take_longer_with_more_ranks(
    tmp_path: Path, rank: int, num_ranks_counted: int
) -> None:
    region, _ = fill_region(tmp_path / "rank", rank=rank)
    client = PersistClient(
        tmp_path / "persist", rank, EventQueue(), no_fault, Clock(), num_ranks=3000
    )
    client.start()
    client.submit(region, [], "", TAG)
    content = request_path(tmp_path / "persist", rank).read_bytes()
    request = msgspec.json.decode(content, type=PersistRequest)
    seconds = request.deadline_s - persist_deadline_s(region.num_bytes)
    assert seconds == pytest.approx(0.2 * num_ranks_counted)


def test_late_result_of_a_request_that_was_given_up_is_not_taken_for_that_of_the_next(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    region, _ = fill_region(tmp_path)
    node.client.submit(region, [], "", TAG)
    old = msgspec.json.decode(request_path(node.directory, 0).read_bytes(), type=PersistRequest)
    node.client.poll(can_go_on=False)
    result = PersistResult(
        rank=0,
        iteration=old.iteration,
        error="given up",
        num_bytes=0,
        num_units=0,
        seconds=0.0,
        path="",
        number=old.number,
    )
    result_path(node.directory, 0).write_bytes(msgspec.json.encode(result))
    node.client.submit(region, [], "", TAG)
    assert not node.client.poll()
    assert not node.client.has_failed
