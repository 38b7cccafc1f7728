"""`make demo`: what it shows is true, and nothing stays of it when it cannot run or is interrupted."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ports import free_port
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
NUM_ITERATIONS, DEAD, BROKEN = 4, 3, 2
REFUSED_S = 120.0


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder with little text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number}.txt").write_text(f"{number} lines of text to learn by heart\n" * 100)
    return folder


@pytest.fixture
def start(
    tmp_path: Path, texts: Path, memory_dir: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts the demo with further flags; it is ended after the test."""
    started: list[subprocess.Popen[str]] = []
    variables = {
        **{name: each for name, each in os.environ.items() if name != "MASTER_PORT"},
        "TEXT_DIR": str(texts),
        "CUDA_VISIBLE_DEVICES": "",
    }

    def begin(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "examples" / "demo.py")]
        command += ["--run-dir", str(tmp_path / "run"), "--memory-dir", str(memory_dir)]
        command += ["--iterations", str(NUM_ITERATIONS), "--port", str(free_port()), *flags]
        job = subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(job)
        return job

    yield begin
    for job in started:
        job.terminate()  # it ends its own
        job.communicate(timeout=120)


def processes_of(folder: Path) -> list[int]:
    """Return the processes whose command line or environment names a folder."""
    found = []
    for each in psutil.process_iter():
        try:
            words = [*each.cmdline(), *each.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(folder) in word for word in words) and each.pid != os.getpid():
            found.append(each.pid)
    return found


def check_nothing_stays(folder: Path, memory: Path) -> None:
    """Check that no process and no memory of the demo is left."""
    wait_for(lambda: not processes_of(folder), "the end of all processes of the demo", poll_s=0.5)
    assert list(memory.iterdir()) == []


def events_of(folder: Path, kind: str) -> dict[str, list[dict[str, Any]]]:
    """Return the events of a kind by file, read without the product."""
    return {
        path.name: [
            event
            for event in map(json.loads, path.read_text().splitlines())
            if event["event"] == kind
        ]
        for path in sorted(folder.glob("rank_*.jsonl"))
    }


def test_demo_kills_a_rank_and_shows_a_repair_that_lost_nothing(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, memory_dir: Path
) -> None:
    demo = start()
    output, _ = demo.communicate(timeout=500)
    assert demo.returncode == 0, output
    whole, killed = (
        {name: [each["sha256_all"] for each in found] for name, found in events.items()}
        for events in (
            events_of(tmp_path / "run" / each, "state_digest") for each in ("undisturbed", "killed")
        )
    )
    assert len(whole) == 4
    assert killed == whole
    repairs = events_of(tmp_path / "run" / "killed", "repair")
    assert [
        [(each["dead_ranks"], each["broken_iteration"]) for each in found]
        for found in repairs.values()
    ] == 4 * [[([DEAD], BROKEN)]]
    assert not any(events_of(tmp_path / "run" / "undisturbed", "repair").values())
    shown = dict(re.findall(r"^   (\S.*?)  +(.*)$", output, re.MULTILINE))
    assert shown["replaced"] == f"rank {DEAD}, which died in iteration {BROKEN + 1}"
    assert (shown["kept their process"], shown["lost tokens"]) == ("ranks 0, 1, 2", "0")
    assert "equal to that of the undisturbed run, bit for bit" in shown["state at the end"]
    assert all(found[-1] in output for found in killed.values())
    # Of Megatron and torch, that a reader cannot act on.
    assert re.findall("warning|deprecated", output, re.IGNORECASE) == []
    check_nothing_stays(tmp_path / "run", memory_dir)


@pytest.mark.rest
@pytest.mark.parametrize("line", ["ranks are forked", "iteration 1 of", "inflicts kill"])
def test_demo_that_is_interrupted_leaves_no_process_and_no_memory(
    line: str, start: Callable[..., subprocess.Popen[str]], tmp_path: Path, memory_dir: Path
) -> None:
    demo = start()
    assert demo.stdout is not None
    assert any(line in each for each in demo.stdout)
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=200)
    assert (demo.returncode, output.splitlines()[-1:]) == (
        130,
        ["interrupted: all processes have ended"],
    )
    check_nothing_stays(tmp_path / "run", memory_dir)


def test_demo_whose_port_is_taken_says_which_and_leaves_nothing(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, memory_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        demo = start("--port", str(port))
        output, _ = demo.communicate(timeout=REFUSED_S)
    assert demo.returncode == 1
    assert f"MASTER_PORT={port} is in use" in output
    check_nothing_stays(tmp_path / "run", memory_dir)


def test_second_demo_in_the_same_folder_is_refused(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, memory_dir: Path
) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "demo.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        demo = start()
        output, _ = demo.communicate(timeout=REFUSED_S)
    assert demo.returncode == 1
    assert f"--run-dir={tmp_path / 'run'} is used by another demo" in output
    check_nothing_stays(tmp_path / "run", memory_dir)


@pytest.mark.rest
def test_demo_without_room_in_memory_shows_what_is_missing_and_leaves_nothing(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, mount_small: Callable[[str], Path]
) -> None:
    memory = mount_small("6m")
    demo = start("--memory-dir", str(memory))
    output, _ = demo.communicate(timeout=REFUSED_S)
    assert demo.returncode == 1
    assert re.search(r"error: --moe-ft-memory-dir=.* MiB .* Enlarge it", output), output
    check_nothing_stays(tmp_path / "run", memory)
