"""The trace of `report --trace`, checked against the format, of the log of a real run with a repair."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from moe_ft.cli import main
from moe_ft.commands.report_trace import open_trace
from moe_ft.errors import ConfigError
from moe_ft.event_lines import SnapshotTier
from moe_ft.events import EventLog
from tests.unit.moe_ft.commands.test_report_page import EVENTS, REAL, events

# Fields besides ph, name, pid and args, by the kind of an event in the Trace Event Format.
FIELDS: dict[str, dict[str, type]] = {
    "X": {"cat": str, "ts": int, "dur": int, "tid": int},
    "i": {"cat": str, "ts": int, "s": str, "tid": int},
    "M": {},
}
Trace = list[dict[str, Any]]


def read_trace(path: Path) -> Trace:
    """Return the events of a trace after checks of its format."""
    value = json.loads(path.read_text())
    assert value["displayTimeUnit"] == "ms"
    trace: Trace = value["traceEvents"]
    named, threads = set(), defaultdict(list)
    for each in trace:
        assert isinstance(each["name"], str) and each["name"] and each["pid"] > 0
        for name, kind in FIELDS[each["ph"]].items():
            assert type(each[name]) is kind, each
        place = each["pid"], each.get("tid")
        if each["ph"] == "M":
            assert each["name"] in ("process_name", "thread_name", "thread_sort_index")
            named.add(place)
        else:
            assert each["ts"] >= 0 and each.get("dur", 0) >= 0
            assert place in named and (each["pid"], None) in named, "names precede what has them"
            assert each.get("s", "t") in ("t", "p", "g")
            threads[place].append(each)
    for own in threads.values():
        open_ends: list[int] = []
        for before, each in zip([None, *own], own, strict=False):
            assert before is None or before["ts"] <= each["ts"], (before, each)
            while open_ends and open_ends[-1] <= each["ts"]:
                open_ends.pop()
            if each["ph"] == "X":
                end = each["ts"] + each["dur"]
                assert not open_ends or end <= open_ends[-1], f"ends after what it is in: {each}"
                open_ends.append(end)
    return trace


def names_of(trace: Trace, kind: str) -> dict[int, str]:
    """Return the names of processes or threads by number."""
    number = {"process_name": "pid", "thread_name": "tid"}[kind]
    return {each[number]: each["args"]["name"] for each in trace if each["name"] == kind}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("trace") / "run.json"
    path.write_text("an older one is replaced")
    assert main(["report", f"{REAL}", "--trace", f"{path}"]) == 0
    assert [each.name for each in path.parent.iterdir()] == ["run.json"]
    return read_trace(path)


def test_each_rank_has_its_iterations_and_they_are_as_long_as_its_log_says(trace: Trace) -> None:
    assert set(names_of(trace, "process_name").values()) == {"vm"}
    for rank in range(4):
        spans = [each for each in trace if each.get("tid") == rank and each["ph"] == "X"]
        found = [each for each in spans if each["name"].startswith("iteration")]
        told = [each for each in EVENTS[rank] if each["event"] == "iteration"]
        assert [each["name"] for each in found] == [
            f"iteration {each['iteration']}" for each in told
        ]
        seconds = sum(each["iteration_s"] for each in told)
        assert sum(each["dur"] for each in found) / 1e6 == pytest.approx(seconds, rel=1e-3)
        assert [each["name"] for each in spans if each not in found] == ["recovering"]


def test_snapshots_recoveries_repairs_and_their_phases_have_threads_of_their_rank(
    trace: Trace,
) -> None:
    names = names_of(trace, "thread_name")
    of_thread = defaultdict(list)
    for each in trace:
        if each["ph"] == "X":
            of_thread[names[each["tid"]]].append(each)
    for tier, kind in zip(SnapshotTier, ("snapshot", "replicate", "persist"), strict=True):
        copies = [len(own) for name, own in of_thread.items() if name.startswith(f"rank 3 {tier}")]
        assert sum(copies) == len([each for each in EVENTS[3] if each["event"] == kind]) > 0
    (repair,) = (each for each in EVENTS[3] if each["event"] == "repair")
    found = {each["name"]: each["dur"] / 1e6 for each in of_thread["rank 3 repairs"]}
    assert found.pop("repair") == pytest.approx(repair["seconds"], abs=1e-5)
    assert found == pytest.approx(repair["phases_s"], abs=1e-5)
    (recovery,) = (each for each in EVENTS[3] if each["event"] == "recovery")
    found = {each["name"]: each["dur"] / 1e6 for each in of_thread["rank 3 recoveries"]}
    assert found.pop("recovery") == pytest.approx(sum(recovery["phases_s"].values()), abs=1e-4)
    assert found == pytest.approx(recovery["phases_s"], abs=1e-4)
    assert {each["name"] for each in of_thread["rank 0 waits"]} > {"own", "exchange", "idle"}


def test_failures_are_moments_of_their_rank(trace: Trace) -> None:
    moments = {each["name"]: each["tid"] for each in trace if each["ph"] == "i"}
    assert moments["died in iteration 9 and was replaced"] == 3
    assert len([*events("repair")]) == len(
        [each for each in trace if each["name"].startswith("is rep")]
    )


def test_parts_of_iterations_lost_nodes_and_verdicts_are_shown(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.start()
    log.write("start", 0, host="node1", time_s=100.0)
    parts = {"forward": 0.25, "backward": 0.5, "step": 0.125}
    times: dict[str, Any] = {"iteration_s": 1.0, "num_tokens": 1, "phases_s": parts}
    log.write("iteration", 1, time_s=101.0, **times)
    log.write("persist", 1, bytes=1, seconds=9e300, time_s=102.0)
    for _ in range(2):  # at the same time
        log.write("replicate", 1, bytes=1, seconds=0.5, time_s=102.0)
    log.incarnation = 1
    log.write("start", 1, host="node9", time_s=103.0)
    repair: dict[str, Any] = {"dead_ranks": [0], "hung_s": {}, "broken_iteration": 1}
    repair |= {"is_replacement": True, "taken_over": {"node1": "node9"}}
    log.write("repair", 2, seconds=0.5, time_s=104.0, **repair)
    log.write("verdict", 2, words="rank 0 \udcff was first", time_s=105.0)
    path = tmp_path / "run.json"
    assert main(["report", f"{tmp_path}", "--trace", f"{path}"]) == 0
    trace = read_trace(path)
    nodes, threads = names_of(trace, "process_name"), names_of(trace, "thread_name")
    moments = [(nodes[each["pid"]], each["s"], each["name"]) for each in trace if each["ph"] == "i"]
    assert ("node9", "p", "node node1 is lost: node9 has its ranks") in moments
    assert ("node9", "t", "tells the verdict: rank 0 \\udcff was first") in moments
    found = {each["name"]: each["dur"] for each in trace if each["name"] in parts}
    assert found == {name: seconds * 1e6 for name, seconds in parts.items()}
    assert {"rank 0 peers", "rank 0 peers 2"} < {*threads.values()}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing/x.json", "must be in a folder that exists. Make it"),
        ("folder", "must be a file, and it is something else. Name a file"),
        ("x" * 300, "cannot be written: File name too long. Name another file"),
    ],
)
def test_file_that_cannot_be_written_is_refused_before_the_log_is_read(
    file: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    assert main(["report", f"{tmp_path / 'no log'}", "--trace", f"{tmp_path / file}"]) == 2
    error = capsys.readouterr().err
    assert f"--trace={tmp_path / file}" in error and message in error


def test_trace_of_a_report_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("older")
    with pytest.raises(ConfigError, match="holds no"), open_trace(path):
        raise ConfigError("holds no event log")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["older"]
