"""The process of the writer: it ends with the rank that started it, and only then."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from moe_ft.engine.persist.client import writer_command
from moe_ft.engine.persist.requests import WriterSettings, request_path, result_path
from moe_ft.engine.persist.writer import HEARTBEAT_NAME
from moe_ft.files.private_files import write_atomically
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.builders import fill_region
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.moe_ft.engine.persist.writer_office import request_for
from tests.waiting import wait_for


def settings_of(url: str, parent: int) -> bytes:
    settings = WriterSettings(url=url, keep=2, parent=parent, lock_owner="")
    return msgspec.json.encode(settings)


class Parent:
    """A process that starts a writer as a rank does, and waits."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        directory.mkdir()
        code = (
            "import json, os, subprocess, sys\n"
            "settings = json.loads(sys.argv[1]) | {'parent': os.getpid()}\n"
            "child = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, bufsize=0)\n"
            "child.stdin.write(json.dumps(settings).encode() + b'\\n')\n"
            "print(child.pid, flush=True)\n"
            "child.wait()\n"
        )
        settings = settings_of(url, parent=0).decode()  # the process itself says who it is
        command = [sys.executable, "-c", code, settings, *writer_command(directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.writer = psutil.Process(self.process.pid)
        self.niceness = self.writer.nice()

    def start(self) -> "Parent":
        """Wait until the writer serves."""
        assert self.process.stdout is not None
        self.writer = psutil.Process(int(self.process.stdout.readline()))
        wait_for((self.directory / HEARTBEAT_NAME).exists, "the writer's heartbeat")
        return self

    def close(self) -> None:
        """End both."""
        if not is_gone(self.writer):
            self.writer.kill()
        self.process.kill()
        self.process.communicate()


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # nobody may be there to reap it
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    parent = Parent(tmp_path / "persist", str(tmp_path / "storage"))
    try:
        yield parent.start()
    finally:
        parent.close()


def test_writer_ends_when_its_parent_is_killed(parent: Parent) -> None:
    parent.process.kill()
    wait_for(lambda: is_gone(parent.writer), "the writer's end")


def test_writer_lets_training_go_first_and_waits_for_nobody_for_ever(parent: Parent) -> None:
    # A machine may give its processes a lower priority already.
    assert parent.writer.nice() == min(parent.niceness + 10, 19)
    assert parent.writer.ionice() == (psutil.IOPRIO_CLASS_BE, 7)  # the idle class may starve


def test_writer_that_is_stopped_ends_when_its_parent_is_killed(parent: Parent) -> None:
    parent.writer.suspend()
    wait_for(lambda: parent.writer.status() == psutil.STATUS_STOPPED, "the writer to stop")
    parent.process.kill()
    wait_for(lambda: is_gone(parent.writer), "the writer's end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_writer_that_is_told_to_end_by_a_launcher_serves_on(
    tmp_path: Path, parent: Parent, number: signal.Signals
) -> None:
    parent.writer.send_signal(number)
    region, _ = fill_region(tmp_path / "rank")
    request = request_for(region)
    write_atomically(request_path(parent.directory, 0), msgspec.json.encode(request))
    wait_for(result_path(parent.directory, 0).exists, "the result")
    assert complete_iterations(Storage(str(tmp_path / "storage"))) == [5]


@pytest.mark.parametrize("settings", [b"", settings_of("/nowhere", 2**22)])
def test_writer_whose_parent_is_dead_already_ends_at_once(tmp_path: Path, settings: bytes) -> None:
    (tmp_path / "persist").mkdir()
    command = writer_command(tmp_path / "persist")
    done = subprocess.run(command, input=settings, timeout=120)
    assert done.returncode == 0
    assert not (tmp_path / "persist" / HEARTBEAT_NAME).exists()


def test_second_writer_of_a_node_waits_until_the_first_has_ended(
    tmp_path: Path, parent: Parent
) -> None:
    heartbeat = parent.directory / HEARTBEAT_NAME
    settings = settings_of(str(tmp_path / "storage"), os.getpid()) + b"\n"
    command = writer_command(parent.directory)
    with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0) as second:
        assert second.stdin is not None
        second.stdin.write(settings)
        parent.process.kill()
        wait_for(lambda: is_gone(parent.writer), "the first writer's end")
        heartbeat.unlink(missing_ok=True)
        wait_for(heartbeat.exists, "the second writer's heartbeat")
        second.kill()
