"""A run that is followed: sums of its events, and a growing log of which nothing is read twice or lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_ft.event_lines import EndLine, OtherLine, SnapshotTier, decode
from moe_ft.events import EventLog, EventTail, event_path
from moe_ft.loop.event_fold import FollowedRun, RankFold
from tests.unit.moe_ft.commands.runs import write_run

MUCH = 1 << 20


def fold_of(directory: Path, rank: int = 0) -> RankFold:
    fold = FollowedRun(directory, [rank])
    fold.read(MUCH)
    return fold.ranks[0]


def test_tail_yields_each_line_once_however_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    whole = b"".join(b"line %d\n" % number for number in range(50))
    path.write_bytes(b"")
    tail, found = EventTail(path), []
    for position in range(0, len(whole), 7):
        with path.open("ab") as file:
            file.write(whole[position : position + 7])
        found += tail.read(5)
    while tail.unread_bytes:
        found += tail.read(5)
    assert b"\n".join(found) + b"\n" == whole


def test_line_that_is_not_whole_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'one\n{"event": "it')
    tail = EventTail(path)
    assert tail.read(MUCH) == [b"one"]
    assert tail.read(MUCH) == []
    with path.open("ab") as file:
        file.write(b'eration"}\n')
    assert tail.read(MUCH) == [b'{"event": "iteration"}']


def test_tail_reads_no_byte_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    tail = EventTail(path)
    assert tail.read(MUCH) == [b"one"]
    with path.open("r+b") as file:  # what was read may be anything now
        file.write(b"ONE\ntwo\n")
    assert tail.read(MUCH) == [b"two"]


def test_file_that_is_made_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    tail = EventTail(path)
    tail.read(MUCH)
    path.unlink()
    path.write_bytes(b"new\n")
    assert tail.read(MUCH) == [b"new"]


def test_tail_from_the_end_leaves_out_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    tail, missing = EventTail(path, is_from_end=True), EventTail(tmp_path / "b", is_from_end=True)
    for each in (path, tmp_path / "b"):
        with each.open("ab") as file:
            file.write(b"new\n")
    assert (tail.read(MUCH), missing.read(MUCH)) == ([b"new"], [b"new"])


def test_fold_adds_up_iterations_without_the_warming_up_in_medians(tmp_path: Path) -> None:
    log = write_run(tmp_path, 0, [5.0, 4.0, 3.0])
    log.write(
        "iteration", 4, iteration_s=0.5, stall_s=0.25, idle_s=0.125, loss="nan", num_tokens=100
    )
    fold = fold_of(tmp_path)
    assert (fold.iteration, fold.num_iterations, fold.num_tokens) == (4, 4, 400)
    assert (fold.iteration_s, fold.tokens_per_s) == (0.5, 200.0)
    assert (fold.total_stall_s, fold.total_idle_s, fold.recent_idle_s) == (0.25, 0.125, 0.125)
    assert fold.loss is not None and fold.loss != fold.loss


def test_fold_knows_the_newest_snapshot_of_each_tier_and_its_bytes(tmp_path: Path) -> None:
    log = write_run(tmp_path, 0, [5.0])
    for iteration in (1, 2):
        log.write("snapshot", iteration, bytes=100, seconds=0.5)
    log.write("replicate", 1, bytes=60, seconds=1.0, state_bytes=100, gradient_bytes=20)
    log.write("replicate", 2, bytes=60, seconds=1.0, peers=[1, 2])  # of an earlier version
    tiers = fold_of(tmp_path).tiers
    assert [(tiers[each].iteration, tiers[each].num_bytes) for each in SnapshotTier] == [
        (2, 200),
        (2, 240),
        (0, 0),
    ]
    assert tiers[SnapshotTier.PEERS].seconds == 2.0


def test_fold_ends_and_begins_again_with_the_next_incarnation(tmp_path: Path) -> None:
    log = write_run(tmp_path, 0, [5.0])
    log.write("stopped", 1, phase="forward", reason="ValueError: x", silent_ranks=[])
    fold = fold_of(tmp_path)
    assert (fold.ending, fold.is_finished) == ("stopped: ValueError: x", False)
    log.incarnation = 1
    log.write("start", 1, pid=7, host="there", world_size=2, train_iterations=9)
    fold = fold_of(tmp_path)
    assert (fold.ending, fold.incarnation, fold.recent) == ("", 1, fold.recent.__class__())
    log.write("end", 9, reason="finished")
    assert (fold_of(tmp_path).ending, fold_of(tmp_path).is_finished) == ("finished", True)


def test_lost_tokens_are_those_of_the_state_that_was_recovered(tmp_path: Path) -> None:
    log = write_run(tmp_path, 0, [5.0])
    common: dict[str, Any] = {"target_iteration": 1, "replayed_iterations": 0, "plt": 0.1}
    common["sources"] = {"memory": 3}
    log.write("recovery", 1, **common, lost_tokens=5, total_lost_tokens=12)
    assert fold_of(tmp_path).lost_tokens == 12
    log.write("recovery", 1, **common, lost_tokens=4, total_lost_tokens=4)
    assert fold_of(tmp_path).lost_tokens == 4


def test_fold_of_a_long_log_is_no_larger_than_that_of_a_short_one(tmp_path: Path) -> None:
    sizes = []
    for rank, num in enumerate((100, 1000)):
        log = EventLog(tmp_path, rank)
        log.start()
        recovery = {"target_iteration": 1, "replayed_iterations": 0, "lost_tokens": 0, "plt": 0.0}
        for at in range(1, num + 1):
            times = {"iteration_s": 1.0, "idle_s": 0.25, "exchange_s": 0.125}
            log.write("iteration", 1000 + at, time_s=1.5, num_tokens=1, loss=2.0, **times)
            log.write("snapshot", 1000, time_s=1.5, bytes=1, seconds=0.5)
            log.write("degraded", 1000, time_s=1.5, part="replicate", reason="no route")
            log.write("recovery", 1000, time_s=1.5, sources={}, read_bytes={"n": 1}, **recovery)
        log.close()
        sizes.append(len(repr(replace(fold_of(tmp_path, rank), rank=0))))
    assert sizes[1] < sizes[0] + 100, "numbers may have more digits"


def test_rank_that_has_no_file_yet_is_waited_for_and_a_folder_in_its_place_is_said(
    tmp_path: Path,
) -> None:
    event_path(tmp_path, 1).mkdir()
    fold = FollowedRun(tmp_path, [0, 1])
    fold.read(MUCH)
    assert fold.problems == {1: "not a regular file"}
    EventLog(tmp_path, 0).start()
    write_run(tmp_path, 0, [5.0])
    fold.read(MUCH)
    assert fold.ranks[0].iteration == 1


def test_lines_become_events_of_their_kind_and_none_with_fields_that_are_wrong() -> None:
    common = '"time": 1.5, "rank": 0, "incarnation": 0, "iteration": 3'
    end = decode(f'{{"event": "end", {common}, "reason": "finished"}}'.encode())
    assert end == EndLine(time=1.5, incarnation=0, iteration=3, reason="finished")
    assert decode(f'{{"event": "end", {common}}}'.encode()) is None  # without its reason
    other = decode(f'{{"event": "window", {common}, "length": 3}}'.encode())
    assert other == OtherLine(time=1.5, incarnation=0, iteration=3, event="window")
    assert decode(b'{"event": "window", "time": 1.5, "incarnation": -1, "iteration": 3}') is None
