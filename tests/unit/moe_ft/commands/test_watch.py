"""`moe_ft watch`: what it shows of a run that trains, stops or has ended, and how it ends itself."""

import os
import pty
import re
import socket
import subprocess
import sys
import termios
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_ft.cli import main
from moe_ft.commands import watch
from moe_ft.events import EventLog, event_path
from moe_ft.faults import Phase
from tests.unit.moe_ft.commands.runs import write_run
from tests.waiting import wait_for

RECOVERY: dict[str, Any] = {
    "target_iteration": 2,
    "replayed_iterations": 1,
    "sources": {"memory": 7, "peer": 2},
    "lost_tokens": 1234,
    "plt": 0.1,
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take its time between an event and the view."""
    monkeypatch.setattr(watch, "_SLOW_S", 1e9)


def shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints once, with single spaces."""
    assert main(["watch", "--once", str(directory)]) == 0
    return re.sub(" +", " ", capsys.readouterr().out)


def write_rank(directory: Path, rank: int, pid: int | None = None, world_size: int = 2) -> EventLog:
    """Write two iterations of a rank of two or more, of this process unless another is named."""
    log = EventLog(directory, rank)
    log.start()
    start: dict[str, Any] = {
        "pid": pid or os.getpid(),
        "host": socket.gethostname(),
        "world_size": world_size,
    }
    log.write("start", 0, **start, train_iterations=50)
    for iteration in (1, 2):
        log.write("iteration", iteration, iteration_s=0.5, stall_s=0.002, loss=4.0, num_tokens=100)
    log.progress(2, Phase.BACKWARD)
    return log


def dead_pid() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_run_that_trains_shows_its_speed_its_loss_and_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        write_rank(tmp_path, rank).write("snapshot", 2, bytes=10, seconds=0.1)
    text = shown(tmp_path, capsys)
    assert "state running on 2 ranks\n" in re.sub(" +\n", "\n", text)
    assert "iteration 2 of 50 · 2.00 iterations/s · 200 tokens/s · loss 4.0000" in text
    assert "last recovery none" in text
    assert f"1 {socket.gethostname()} 0 2 0.500 2.0 - 2 - - backward" in text


def test_recovery_repair_and_troubles_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_rank(tmp_path, 0)
    log.write("recovery", 2, **RECOVERY)
    facts: dict[str, Any] = {"dead_ranks": [1], "hung_s": {}, "broken_iteration": 2}
    log.write("repair", 3, **facts, seconds=1.25, shared=[1, 3])
    log.write("degraded", 3, part="replicate", reason="no route\nto host", traceback="")
    log.write("skipped", 3, part="snapshot", reason="x")
    text = shown(tmp_path, capsys)
    assert "continued after iteration 2: 7 units from memory, 2 units from peer" in text
    assert "rank 1 in iteration 3, 1.2 s until that was finished; without a device" in text
    assert "of their own: ranks 1, 3" in text
    assert "lost tokens 1,234" in text
    assert "1 failures of checkpointing, the last of replicate: no route" in text
    assert "1 snapshots were due and left out" in text
    assert "starting: 1 of 2 ranks have begun start 1; nothing yet from the others" in text


def test_who_failed_first_and_who_hung_in_the_last_start_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_rank(tmp_path, 0)
    log.write("verdict", 2, words="rank 1 ran out of memory")
    log.write("hang", 2, section="evaluation", silent_s=61.0, limit_s=60.0)
    text = shown(tmp_path, capsys)
    assert "verdict: rank 1 ran out of memory" in text
    assert "rank 0 hung in its evaluation: 61 s without progress, limit 60 s" in text
    log.incarnation = 1
    log.write("start", 2)
    text = shown(tmp_path, capsys)
    assert "verdict:" not in text and "hung in" not in text


def test_run_that_has_ended_is_said_to_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        write_rank(tmp_path, rank).write("end", 2, reason="finished")
    assert "state the run has ended: finished" in shown(tmp_path, capsys)
    # Without --once as well, where there is no terminal.
    assert main(["watch", str(tmp_path)]) == 0
    assert "the run has ended" in capsys.readouterr().out


def test_ranks_that_stopped_may_start_again_until_a_minute_has_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path, 0).write("stopped", 2, phase="forward", reason="SIGTERM")
    write_rank(tmp_path, 1, dead_pid())
    text = shown(tmp_path, capsys)
    assert "all ranks have stopped; a restart may follow" in text
    assert "gone, in backward" in text
    monkeypatch.setattr(watch, "_RESTART_S", 0.0)
    assert "the run has ended: killed; stopped: SIGTERM" in shown(tmp_path, capsys)


def test_silent_ranks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(tmp_path, 0)
    monkeypatch.setattr(watch, "_SILENT_S", 0.0)
    monkeypatch.setattr(watch, "_SILENT_ITERATIONS", 0)
    text = shown(tmp_path, capsys)
    assert "no rank has written anything for 0 s" in text
    assert "silent for 0 s, in backward" in text


def test_of_many_ranks_those_with_trouble_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(40):
        write_rank(tmp_path, rank)
    write_rank(tmp_path, 33).write("stopped", 2, phase="forward", reason="ValueError: x")
    text = shown(tmp_path, capsys)
    assert re.search(r"\n 33 .* stopped: ValueError: x", text)
    assert "24 more ranks" in text


def test_log_that_grows_is_read_on_and_a_line_that_is_not_whole_waits(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0])
    view = watch.Watch(tmp_path)
    view.look()
    path = event_path(tmp_path, 0)
    size = path.stat().st_size
    write_run(tmp_path, 0, [5.0, 4.0], incarnation=1)
    added = path.read_bytes()[size:]
    # Make the part that was read unreadable: nobody reads it again.
    path.write_bytes(b"x" * (size - 1) + b"\n" + added[:-20])
    with path.open("r+b"):
        view.look()
    (rank,) = view._run.ranks
    assert (rank.incarnation, rank.iteration, rank.num_not_read) == (1, 1, 0)
    with path.open("ab") as file:
        file.write(added[-20:])
    view.look()
    assert (rank.iteration, rank.num_not_read) == (2, 0)


def test_rank_whose_file_appears_later_is_shown(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    view = watch.Watch(tmp_path)
    write_rank(tmp_path, 1)
    view.look()
    assert [each.rank for each in view._run.ranks] == [0, 1]


@pytest.mark.parametrize("name", ["empty", "missing", "file"])
def test_folder_without_a_log_is_refused_with_the_remedy(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main(["watch", "--once", str(tmp_path / name)]) == 2
    assert f"{tmp_path / name} holds no event log" in (error := capsys.readouterr().err)
    assert "Give the directory that --moe-ft-event-log named" in error


def test_interval_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--interval", "0", str(tmp_path)]) == 2
    assert "--interval=0.0 must be more than 0. Give" in capsys.readouterr().err


def view_at(directory: Path, width: int) -> list[str]:
    """Return the lines of the view of a terminal."""
    view, file = watch.Watch(directory), StringIO()
    console = Console(file=file, width=width, height=40, force_terminal=True, color_system=None)
    view.look()
    console.print(view.view(console, height=40))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.fixture
def repaired(tmp_path: Path) -> Path:
    """Return the folder of a run of which rank 3 has just died; a repair is to follow."""
    for rank in range(4):
        log = write_rank(tmp_path, rank, dead_pid() if rank == 3 else None, world_size=4)
        log.write("snapshot", 2, bytes=10, seconds=0.1)
        if rank == 0:
            log.write("protects", 0, strategy="dense", lost_rank="repair")
    return tmp_path


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (60, ["rank", "iteration", "memory", "peers", "storage", "state"]),
        (80, ["rank", "host", "iteration", "s/iteration", "memory", "peers", "storage", "state"]),
        (
            110,
            [
                *("rank", "host", "start", "iteration", "s/iteration", "stall ms", "idle ms"),
                *("memory", "peers", "storage", "state"),
            ],
        ),
    ],
)
def test_table_is_readable_during_a_repair_at_any_width(
    width: int, columns: list[str], repaired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "socket", FewLetters)
    lines = view_at(repaired, width)
    assert max(map(len, lines)) <= width
    head = next(n for n, line in enumerate(lines) if line.startswith("rank"))
    assert lines[head].split("  ")[0] == "rank"
    assert re.sub("  +", "  ", lines[head]).split("  ") == columns
    assert not any("…" in line for line in lines)
    assert lines[head + 4].endswith("gone, in backward")
    assert "rank 3 has gone: being repaired in place" in " ".join(" ".join(lines).split())
    assert not any("running on" in line for line in lines)


class FewLetters:
    """Stands in for the module of hosts; this one has two letters."""

    @staticmethod
    def gethostname() -> str:
        return "vm"


def test_long_state_is_cut_and_told_whole_above_the_table(tmp_path: Path) -> None:
    reason = "RuntimeError: " + "the network between the nodes is gone " * 3
    for rank in (0, 1):
        log = write_rank(tmp_path, rank)
    log.write("stopped", 2, phase="forward", reason=reason)
    lines = view_at(tmp_path, 80)
    cut = next(line for line in lines if line.endswith("…"))
    assert re.match(r"\s+1 +.* 2 .*stopped: Runtime", cut)
    assert f"rank 1 stopped: {reason.strip()}" in " ".join(" ".join(lines).split())


def test_iterations_of_this_and_earlier_starts_are_drawn_as_bars(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0] * 5)
    write_run(tmp_path, 0, [5.0] * 3, incarnation=1)
    (line,) = (each for each in view_at(tmp_path, 80) if each.startswith("seconds of each"))
    assert line.split()[3:] == ["█▁▁▁▁█▁▁", "up", "to", "9.000"]
    write_run(tmp_path, 0, [5.0] * 99, incarnation=2)
    (line,) = (each for each in view_at(tmp_path, 60) if each.startswith("seconds of each"))
    assert line.split()[3:] == ["█" * 26, "up", "to", "0.500"]


def test_silence_after_fast_iterations_is_told_before_ranks_are_called_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        write_rank(tmp_path, rank)
    monkeypatch.setattr(watch, "_SLOW_S", 0.0)
    monkeypatch.setattr(watch, "_SLOW_ITERATIONS", 0)
    assert "nothing has come for 0 s; an iteration takes 0.500 s" in shown(tmp_path, capsys)


def test_q_ends_the_view_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "moe_ft", "watch", str(tmp_path)]
    output = bytearray()

    def has_shown(words: bytes) -> bool:
        output.extend(os.read(ours, 1 << 16))
        return re.search(words, output) is not None

    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, env={**os.environ, "TERM": "xterm"}
    ) as job:
        wait_for(lambda: has_shown(b"q quits"), "the view")
        # Written while it runs, and shown.
        EventLog(tmp_path, 1).start()
        write_rank(tmp_path, 1)
        wait_for(lambda: has_shown(b"running on 2 ranks|nothing has come"), "the second rank")
        assert termios.tcgetattr(theirs) != before
        os.write(ours, b"q")
        assert job.wait(timeout=60) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)
