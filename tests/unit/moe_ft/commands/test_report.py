"""Summaries of runs from their event logs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moe_ft.cli import main
from moe_ft.commands.report import render
from moe_ft.commands.report_run import read_run
from moe_ft.commands.report_summary import summarize_run
from moe_ft.commands.report_sums import JobHistory, Median
from moe_ft.event_lines import decode
from moe_ft.events import event_path, read_lines
from moe_ft.faults import Phase
from moe_ft.planning.time_shares import Spent
from tests.unit.moe_ft.commands.runs import summarize, write_run


def test_summary_of_a_finished_run_leaves_the_warming_up_out(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0, 4.0, 3.0]).write("end", 3, reason="finished")
    summary = summarize(tmp_path)
    assert (summary.last_iteration, summary.first_loss, summary.last_loss) == (3, 5.0, 3.0)
    assert (summary.iteration_s, summary.tokens_per_s) == (0.5, 200.0)
    assert [rank.ending for rank in summary.ranks] == ["finished"]
    text = render(summary)
    assert "how it ended" not in text and "left out" not in text


def test_bytes_to_peers_are_told_by_kind_and_tokens_at_risk_by_target(tmp_path: Path) -> None:
    log = write_run(tmp_path, 0, [5.0])
    for state, gradients in ((2048, 0), (1024, 1024)):
        log.write("replicate", 1, bytes=9, seconds=0.1, state_bytes=state, gradient_bytes=gradients)
    log.write("at_risk", 1, tokens={"memory": 10})
    log.write("at_risk", 2, tokens={"memory": 30, "peers": 50})
    text = " ".join(render(summarize(tmp_path)).split())
    assert "state, gradients to peers 3.00 KiB, 1.00 KiB (last rank)" in text
    assert "tokens not in memory (mean) 20 tokens not in peers (mean) 50" in text
    log.write("end", 2, reason="finished")


def test_tables_of_slots_are_summed_up_over_layers_and_stages(tmp_path: Path) -> None:
    def layer(before: list[int], after: list[int], moved: int) -> dict[str, Any]:
        return {"tokens_before": before, "tokens_after": after, "moved_replicas": moved}

    first, last = write_run(tmp_path, 0, [5.0]), write_run(tmp_path, 1, [5.0])
    for number, log in enumerate((first, last)):
        changed = {f"layer.{number}": layer([30, 10], [22, 18], 3)}
        log.write("slot_table", 1, layers=changed, sent_bytes=512)
        log.write("slot_table", 2, layers={}, sent_bytes=512 * number)
        log.write("end", 2, reason="finished")
    text = " ".join(render(summarize(tmp_path)).split())
    assert "tables of slots 2 new ones in 2 layers, 6 replicas moved" in text
    assert "busiest rank over the mean 1.50 and 1.10, before new tables and with them" in text
    assert "by a rank 1.00 KiB of gradients and weights, 0 B of the optimizer's state" in text


def test_every_ending_is_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0]).write(
        "stopped", 1, phase="forward", reason="RuntimeError: lost", silent_ranks=[1, 2]
    )
    killed = write_run(tmp_path, 1, [5.0])
    killed.progress(1, Phase.BACKWARD)
    killed.write("fault_injected", 1, kind="kill", phase="backward")
    write_run(tmp_path, 2, [5.0])
    write_run(tmp_path, 3, [5.0]).write("end", 1, reason="exit flag")
    ranks = summarize(tmp_path).ranks
    assert [rank.ending for rank in ranks] == [
        "stopped: RuntimeError: lost; heard nothing from 1, 2",
        "fell silent after an injected kill",
        "fell silent: running, killed or hung",
        "exit flag",
    ]
    assert ranks[1].phase == "backward"
    assert "how it ended" in render(summarize(tmp_path))


def test_last_incarnation_decides_how_a_rank_ended(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0]).write("stopped", 1, phase="forward", reason="x", silent_ranks=[])
    write_run(tmp_path, 0, [4.5, 4.0], incarnation=1).write("end", 2, reason="finished")
    summary = summarize(tmp_path)
    assert (summary.num_starts, summary.ranks[0].iteration) == (2, 2)
    assert summary.ranks[0].ending == "finished"


def test_losses_are_those_of_a_rank_that_is_still_there_and_numbers_of_ranks_are_told(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, 1, [5.0])
    write_run(tmp_path, 0, [5.0])
    log = write_run(tmp_path, 0, [5.0, 4.0], incarnation=1)
    changes: list[dict[str, Any]] = [{"from": 4, "to": 3}, {"from": 3, "to": 2, "waiting": [2]}]
    for iteration, fields in enumerate(changes, 1):
        log.write("elastic", iteration, **fields)
    summary = summarize(tmp_path)
    assert summary.last_loss == 4.0
    assert (
        "ranks                           4, 3 from iteration 1, 2 from iteration 2 (1 wait)"
        in render(summary)
    )


def test_idle_time_is_told_from_the_rank_with_the_least_to_that_with_the_most(
    tmp_path: Path,
) -> None:
    times = {"iteration_s": 1.0, "num_tokens": 1}
    for rank, idle in enumerate([(0.1, 0.2, 0.9), (0.4, None, 0.6), (None, None, None)]):
        log = write_run(tmp_path, rank, [])
        for iteration, idle_s in enumerate(idle, 1):
            log.write("iteration", iteration, idle_s=idle_s, **times)
    summary = summarize(tmp_path)
    assert [rank.idle_s for rank in summary.ranks] == [0.2, 0.5, None]
    assert "seconds idle, by rank (median)  0.200 to 0.500" in render(summary)


def test_hangs_are_counted_by_section_where_all_ranks_are_read(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0, 4.5])
    for _ in range(2):
        log = write_run(tmp_path, 1, [5.0])
        log.write("hang", 1, section="evaluation", silent_s=61.4, limit_s=60.0)
    summary = summarize_run(read_run(tmp_path, all_ranks=True), tmp_path)
    assert summary.hangs == {"evaluation": 2}
    assert summary.ranks[1].ending == "hung in its evaluation: 61 s without progress, limit 60 s"
    assert "hangs                           2 in evaluation" in render(summary)
    write_run(tmp_path, 2, [5.0])
    assert summarize(tmp_path).hangs is None, "the last rank alone is read"


def test_repairs_are_told_from_restarts(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0])
    assert "\nstarts                          1\n" in render(summarize(tmp_path))
    write_run(tmp_path, 0, [4.5], incarnation=1)
    write_run(tmp_path, 0, [4.0], incarnation=2).write(
        *("repair", 7),
        dead_ranks=[1, 3],
        hung_s={"3": 5.02},
        broken_iteration=6,
        seconds=30.46,
        taken_over={"node1": "node9"},
        shared=[1, 3],
    )
    for _ in range(2):  # once more in another start
        log = write_run(tmp_path, 0, [4.0], incarnation=3)
        log.write("skipped_batch", 7, failed_rank=1, kind="data", what="ValueError: sample 3")
    summary = summarize(tmp_path)
    lines = render(summary).splitlines()
    assert "starts                          4, 1 of them repairs in place" in lines
    left_out = "1: iteration 7 (rank 1: ValueError: sample 3)"
    assert f"batches left out                {left_out}" in lines
    head = lines.index(
        "start  replaced ranks  that hung  nodes            shared  in iteration  seconds"
    )
    assert lines[head + 2] == (
        "    2  1, 3                    3  node9 for node1  1, 3               7     30.5"
    )


def test_repair_of_an_earlier_version_that_had_roles_played_is_read(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"dead_ranks": [], "hung_s": {}, "broken_iteration": 6, "seconds": 4.5}
    write_run(tmp_path, 0, [5.0]).write("repair", 7, **facts, played={"3": 2})
    (repair,) = summarize(tmp_path).repairs
    assert (repair.repair_s, repair.shared_ranks) == (4.5, ())


def test_rank_without_events_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0]).write("end", 1, reason="finished")
    (tmp_path / "rank_00001.jsonl").touch()
    assert [rank.rank for rank in summarize(tmp_path).ranks] == [0]


ODD_LINES = {
    "no incarnation": '{"event":"iteration","iteration":9}',
    "no times": '{"event":"iteration","iteration":9,"incarnation":0}',
    "loss in words": (
        '{"event":"iteration","iteration":9,"incarnation":0,"loss":"low","iteration_s":1,"num_tokens":1}'
    ),
    "end without a reason": '{"event":"end","iteration":9,"incarnation":0}',
    "silence of no ranks": (
        '{"event":"stopped","iteration":9,"incarnation":0,"reason":"","silent_ranks":5}'
    ),
    "recovery without sources": '{"event":"recovery","iteration":9,"incarnation":0,"plt":0}',
    "torn line": '{"event":"iteration","iter',
    "nested brackets": "[" * 200_000,
    "event with nested brackets": '{"event":"x","iteration":9,"incarnation":0,"time":1,"x":'
    + "[" * 9000,
    "process of 71 bits": (
        '{"event":"start","iteration":0,"incarnation":0,"time":1,"pid":2361183241434822606848}'
    ),
    "time without a date": '{"event":"x","iteration":9,"incarnation":0,"time":1e300}',
    "bytes beyond a float": (
        '{"event":"persist","iteration":9,"incarnation":0,"time":1,"seconds":1,"bytes":1'
        + "0" * 400
        + "}"
    ),
}


def test_median_of_very_many_numbers_is_of_evenly_chosen_ones() -> None:
    values = Median()
    for number in range(200_001):
        values.add(float(number))
    assert values.value == pytest.approx(100_000, abs=4)


def test_losses_before_a_recovery_are_those_of_the_history_that_stays(tmp_path: Path) -> None:
    log = write_run(tmp_path, 0, [9.0, 8.0, 7.0, 1.0])
    log.incarnation = 1
    lost: dict[str, Any] = {"lost_tokens": 5, "plt": 0.5}
    log.write("recovery", 3, target_iteration=3, replayed_iterations=0, sources={}, **lost)
    log.write("iteration", 4, iteration_s=1.0, num_tokens=1, loss=6.0)
    summary = summarize(tmp_path)
    (recovery,) = summary.recoveries
    assert (recovery.loss_before, recovery.loss_after, summary.last_loss) == (8.0, 6.0, 6.0)
    history = JobHistory(4)
    for event in map(decode, read_lines(event_path(tmp_path, 0))):
        assert event is not None
        history.take(event)
    assert [point.mean for point in history.points.values()] == [9.0, 8.0, 7.0, 6.0]


@pytest.mark.parametrize("line", ODD_LINES.values(), ids=ODD_LINES)
def test_line_that_is_no_event_is_left_out_and_counted(line: str, tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0, 4.0]).write("end", 2, reason="finished")
    with event_path(tmp_path, 0).open("a") as file:
        file.write(line + "\n")
    assert main(["watch", "--once", str(tmp_path)]) == 0
    summary = summarize(tmp_path)
    assert (summary.last_iteration, summary.last_loss) == (2, 4.0)
    assert summary.ranks[0].ending == "finished"
    assert "left out: 1 line that is no event" in render(summary)


def test_iterations_are_found_before_a_line_longer_than_what_is_read_at_once(
    tmp_path: Path,
) -> None:
    for rank in (0, 1):
        log = write_run(tmp_path, rank, [5.0, 4.0], incarnation=3)
        log.write("router_load", 2, tokens={"layer.0": [10_000] * 30_000})
    assert [(rank.iteration, rank.start) for rank in summarize(tmp_path).ranks] == [(2, 3)] * 2


def test_rank_file_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0]).write("end", 1, reason="finished")
    event_path(tmp_path, 1).mkdir()
    summary = summarize(tmp_path)
    assert [rank.rank for rank in summary.ranks] == [0]
    assert "left out: rank_00001.jsonl: not a regular file" in render(summary)


def test_loss_that_is_no_number_is_reported_as_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0, float("nan")]).write("end", 2, reason="finished")
    assert re.search("^loss at end +nan$", render(summarize(tmp_path)), re.MULTILINE)


def test_what_ended_a_rank_is_printed_whatever_its_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A path that is no UTF-8, as Python hands it on.
    write_run(tmp_path, 0, [5.0]).write("stopped", 1, reason="no \udcff", silent_ranks=None)
    assert main(["report", str(tmp_path)]) == 0
    assert r"stopped: no \udcff" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["missing", "."])
def test_directory_without_events_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / name)]) == 2
    assert "holds no event log" in capsys.readouterr().err


def test_time_of_a_run_is_divided_without_a_rest(tmp_path: Path) -> None:
    lines = [
        *("start 0 0", "iteration 0 1 5", "iteration 0 2 7", "iteration 0 3 9 stall_s=0.5"),
        # Killed after 9 s. Of the 11 s until iteration 3 runs again, 4 s replay a window.
        *("recovery 1 2", "start 1 2", "iteration 1 3 22", "iteration 1 4 24"),
    ]
    write_lines(tmp_path, lines)
    shares = summarize(tmp_path).time_shares
    # From the beginning of the first iteration, at 3 s: 21 s.
    assert shares.productive == pytest.approx((2 + 2 + 1.5 + 2) / 21)
    assert shares.blocked == pytest.approx(0.5 / 21)
    assert shares.redone == pytest.approx((4 + 2) / 21)
    assert shares.recovering == pytest.approx(7 / 21)
    assert re.search(r"recovering +33.33%", render(summarize(tmp_path)))


def test_time_and_losses_are_told_while_ranks_leave_and_come(tmp_path: Path) -> None:
    starts = [["start 0 0 3", "iteration 0 1 5", "iteration 0 2 7"]]
    starts += [
        ["recovery 1 2", "start 1 2 2", *(f"iteration 1 {3 + n} {13 + 2 * n}" for n in range(4))]
    ]
    starts += [["recovery 2 6", "start 2 6 3", "iteration 2 7 25", "iteration 2 8 27"]]
    for rank in range(3):
        there = [starts[0], *([starts[1]] if rank < 2 else []), starts[2]]
        write_lines(tmp_path, sum(there, []), rank)
    for all_ranks in (False, True):
        run = read_run(tmp_path, all_ranks=all_ranks)
        # 24 s. Of 4 s before the first iteration of each other start recoveries replay for 4 s.
        assert run.shares.productive == pytest.approx(8 * 2 / 24)
        assert run.shares.redone == pytest.approx(8 / 24)
        assert [each.event.incarnation for each in run.history.recoveries] == [1, 2]
        losses = [run.history.points[n].mean for n in sorted(run.history.points)]
        assert losses == [2, 2, 1, 1, 1, 1, 2, 2], "ranks that had them"
    alone = read_run(tmp_path, all_ranks=True).folds[2].spent.seconds
    assert alone[Spent.RECOVERING] == 0, "others trained"


def test_recovery_counts_where_a_rank_ended_before_it_noted_its_last_iteration(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path, ["start 0 0", "iteration 0 1 5", "start 1 2", "iteration 1 3 13"])
    run = read_run(tmp_path, all_ranks=False)
    assert run.folds[0].spent.seconds[Spent.RECOVERING] == 6


def test_rank_that_comes_later_does_not_hide_what_was_before(tmp_path: Path) -> None:
    before = ["start 0 0 1", "iteration 0 1 5", "iteration 0 2 7"]
    after = ["start 1 2 2", "iteration 1 3 13"]
    write_lines(tmp_path, [*before, *after])
    write_lines(tmp_path, after, 1)
    run = read_run(tmp_path, all_ranks=False)
    assert run.folds[0].spent.seconds[Spent.PRODUCTIVE] == 6
    assert run.folds[0].spent.seconds[Spent.RECOVERING] == 4
    assert sorted(run.history.points) == [1, 2, 3]


def write_lines(directory: Path, lines: list[str], rank: int = 0) -> None:
    """Write iterations of 2 s as ``KIND INCARNATION ITERATION [TIME [stall_s=S]]``, a loss that is the rank.

    A start may have the number of its ranks instead of a time.
    """
    recovery = {
        "replayed_iterations": 2,
        "sources": {},
        "phases_s": {"replay": 4},
    }
    recovery |= {"lost_tokens": 0, "plt": 0.0}
    written = []
    for line in lines:
        kind, incarnation, iteration, *rest = line.split()
        value: dict[str, Any] = {"time": 0.0, "rank": rank, "event": kind}
        value |= {"incarnation": int(incarnation), "iteration": int(iteration)}
        if kind == "recovery":
            value |= {"target_iteration": int(iteration), **recovery}
        if kind == "start" and rest:
            value["world_size"] = int(rest[0])
        if kind == "iteration":
            stall_s = float(rest[1].partition("=")[2]) if rest[1:] else 0.0
            value |= {
                "time": float(rest[0]),
                "iteration_s": 2.0,
                "num_tokens": 1,
                "stall_s": stall_s,
                "loss": float(rank),
            }
        written.append(json.dumps(value))
    event_path(directory, rank).write_text("\n".join(written) + "\n")
