"""The event log survives what kills its writer."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft import events
from moe_ft.events import (
    EventLog,
    EventTail,
    RankProgress,
    event_path,
    last_incarnation,
    progress_path,
    ranks_with_events,
    read_events,
    read_lines,
    read_lines_backwards,
    read_progress,
)
from moe_ft.faults import Phase


def started(directory: Path, rank: int = 0, incarnation: int = 0) -> EventLog:
    log = EventLog(directory, rank)
    log.start()
    log.incarnation = incarnation
    return log


def test_lines_of_several_threads_are_whole_and_closing_drops_the_rest(tmp_path: Path) -> None:
    log, num_threads, num_events = started(tmp_path), 4, 300
    begin = threading.Barrier(num_threads + 1)

    def write(thread: int) -> None:
        begin.wait()
        for number in range(num_events):
            log.write("note", number, thread=thread, text="x" * (number % 50) * 100)
            log.progress(number, Phase.FORWARD)

    with ThreadPoolExecutor(num_threads) as pool:
        done = [pool.submit(write, thread) for thread in range(num_threads)]
        begin.wait()
        wait(done, return_when=FIRST_COMPLETED)
        log.close()
    assert [each.exception() for each in done] == [None] * num_threads
    lines = [json.loads(line) for line in read_lines(event_path(tmp_path, 0))]
    for thread in range(num_threads):
        found = [line["iteration"] for line in lines if line["thread"] == thread]
        assert found == list(range(len(found)))
    assert len(lines) >= num_events


def test_line_of_which_the_file_system_writes_a_part_at_a_time_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, write = started(tmp_path), os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, bytes(content[:9])))
    for number in range(2):
        log.write("note", number)
    assert [each["iteration"] for each in read_events(event_path(tmp_path, 0))] == [0, 1]
    log.close()


def test_files_can_be_read_by_their_user_only(tmp_path: Path) -> None:
    started(tmp_path).close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_events_are_appended_over_incarnations(tmp_path: Path) -> None:
    for incarnation in (0, 1):
        log = started(tmp_path / "events", incarnation=incarnation)
        log.write("iteration", 7, loss=1.5)
        log.close()
    lines = list(read_events(event_path(tmp_path / "events", 0)))
    assert [(line["incarnation"], line["iteration"], line["loss"]) for line in lines] == [
        (0, 7, 1.5),
        (1, 7, 1.5),
    ]
    assert last_incarnation(tmp_path / "events", 0) == 1


@pytest.mark.parametrize("num_bytes_kept", range(1, 60, 7))
def test_torn_last_line_is_passed_over_and_does_not_spoil_the_next(
    num_bytes_kept: int, tmp_path: Path
) -> None:
    log = started(tmp_path)
    log.write("iteration", 1)
    whole = event_path(tmp_path, 0).read_bytes()
    event_path(tmp_path, 0).write_bytes(whole + whole[:num_bytes_kept])
    log.close()
    log = started(tmp_path, incarnation=1)
    log.write("iteration", 2)
    assert [line["iteration"] for line in read_events(event_path(tmp_path, 0))] == [1, 2]


ODD_LINES = {
    "no incarnation": b'{"event":"start","iteration":0}',
    "incarnation in words": b'{"event":"start","iteration":0,"incarnation":"two"}',
    "incarnation that is a truth value": b'{"event":"start","iteration":0,"incarnation":true}',
    "negative incarnation": b'{"event":"start","iteration":0,"incarnation":-3}',
    "incarnation of 71 bits": b'{"event":"start","iteration":0,"incarnation":2361183241434822606848}',
    "no iteration": b'{"event":"start","incarnation":9}',
    "event without a name": b'{"event":["start"],"iteration":0,"incarnation":9}',
    "list": b'[{"event":"start"}]',
    "number": b"9",
    "nested brackets": b"[" * 200_000 + b"]" * 200_000,
    "bytes that are no text": bytes(range(256)).replace(b"\n", b""),
    "zeros of a crashed host": bytes(5000),
    "beginning of an event": b'{"event":"start","iteration":0,"incarnation":9',
}


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES)
def test_line_that_is_no_event_is_passed_over_when_starts_are_counted(
    line: bytes, tmp_path: Path
) -> None:
    started(tmp_path, incarnation=7).write("iteration", 1)
    with event_path(tmp_path, 0).open("ab") as file:
        file.write(line + b"\n")
    assert last_incarnation(tmp_path, 0) == 7


def test_starts_are_counted_before_lines_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    log = started(tmp_path, incarnation=7)
    # DeepSeek-V3 has 58 MoE layers of 256 experts.
    log.write("router_load", 101, tokens={f"layer.{n}": [10_000] * 256 for n in range(58)})
    log.close()
    whole = event_path(tmp_path, 0).read_bytes()
    assert len(whole) > events._FIRST_BLOCK_BYTES
    event_path(tmp_path, 0).write_bytes(whole + whole[: len(whole) // 2])
    assert last_incarnation(tmp_path, 0) == 7


def test_no_more_than_the_end_of_an_endless_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_MAX_TAIL_BYTES", 1 << 20)
    started(tmp_path, incarnation=7).write("iteration", 1)
    with event_path(tmp_path, 0).open("ab") as file:
        file.write(bytes(2 << 20))
    assert last_incarnation(tmp_path, 0) == -1


def test_holes_of_any_size_in_a_log_are_passed_over(tmp_path: Path) -> None:
    path, line = tmp_path / "log", b'{"event": "x"}'
    path.write_bytes(line + b"\n")
    with path.open("ab") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line + b"\n")
        file.truncate(1 << 41)
    tail, found = EventTail(path), list[bytes]()
    while not found or tail.unread_bytes:
        found += tail.read(1 << 20)
    assert [sum(line in each for each in lines) for lines in (found, read_lines(path))] == [2, 2]
    assert line in list(read_lines_backwards(path))


@given(st.lists(st.one_of(st.just(b""), st.binary(max_size=40), st.just(b"event")), max_size=30))
def test_lines_from_the_end_are_those_from_the_beginning(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("events") / "rank_00000.jsonl"
    whole = [
        json.dumps({"event": "x", "iteration": n, "incarnation": 0}).encode() for n in range(30)
    ]
    path.write_bytes(
        b"\n".join(
            event if line == b"event" else line for line, event in zip(lines, whole, strict=False)
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "_FIRST_BLOCK_BYTES", 3)
        forwards = [line.removesuffix(b"\n") for line in read_lines(path)]
        assert list(read_lines_backwards(path)) == forwards[::-1]


def test_log_without_a_single_event_is_continued_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event_path(tmp_path, 0).write_text('{"event":"start"}\n')
    assert last_incarnation(tmp_path, 0) == -1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "rank_00000.jsonl holds no events that can be read: rank 0 counts" in errors


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.with_name("mine").touch()
    path.symlink_to(path.with_name("mine"))


@pytest.mark.parametrize(
    "make", [Path.mkdir, make_pipe, make_link], ids=["directory", "pipe", "link"]
)
@pytest.mark.parametrize("path_of", [event_path, progress_path])
def test_log_that_is_no_file_is_given_up_with_a_line(
    make: Callable[[Path], None],
    path_of: Callable[[Path, int], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(path_of(tmp_path, 0))
    assert last_incarnation(tmp_path, 0) == -1
    log = started(tmp_path)
    log.write("iteration", 1)
    log.progress(1, Phase.FORWARD)
    assert capsys.readouterr().err.count("rank 0 writes no more events") == 1
    assert not (tmp_path / "mine").exists() or not (tmp_path / "mine").read_bytes()


def test_progress_is_the_last_phase_entered(tmp_path: Path) -> None:
    log = started(tmp_path, incarnation=3)
    log.progress(100_000, Phase.BEFORE_STEP)
    log.progress(8, Phase.IN_STEP)
    assert read_progress(tmp_path, 0) == RankProgress(
        incarnation=3, iteration=8, phase=Phase.IN_STEP
    )


@given(st.binary(max_size=80))
def test_unreadable_progress_is_no_progress(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("progress")
    progress_path(folder, 0).write_bytes(b"x" + data)
    assert read_progress(folder, 0) is None


def test_missing_files_have_no_incarnation_and_no_progress(tmp_path: Path) -> None:
    assert last_incarnation(tmp_path, 0) == -1
    assert read_progress(tmp_path, 0) is None
    assert ranks_with_events(tmp_path) == ()


def test_log_that_can_no_longer_be_written_gives_up_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(Path("/dev"), 0)
    log._events_fd = os.open("/dev/full", os.O_WRONLY)  # every write: no space left on device
    log.write("iteration", 1)
    log.write("iteration", 2)
    errors = capsys.readouterr().err
    assert errors.count("rank 0 writes no more events") == 1
    assert "No space left" in errors


def test_loss_that_is_no_number_is_valid_json(tmp_path: Path) -> None:
    started(tmp_path).write("iteration", 1, loss=float("nan"))
    assert next(read_events(event_path(tmp_path, 0)))["loss"] == "nan"
    assert "NaN" not in event_path(tmp_path, 0).read_text()


def test_log_that_was_not_started_drops_what_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "never", 0)
    log.write("iteration", 1)
    log.progress(1, Phase.FORWARD)
    log.close()
    assert not (tmp_path / "never").exists()
