"""The page of `report --html`, and the sums of all ranks, on the log of a real run with a repair."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moe_ft.cli import main
from moe_ft.commands import report_run
from moe_ft.commands.report import tables_of
from moe_ft.commands.report_page import as_html
from moe_ft.commands.report_run import ReportedRun, read_run
from moe_ft.commands.report_summary import summarize_run
from moe_ft.commands.report_sums import Frame, TimelineRow, new_cells, sampled
from moe_ft.event_lines import Mark, SnapshotTier
from moe_ft.events import Event, event_path, read_events, read_lines
from moe_ft.loop.event_fold import RankFold
from moe_ft.planning.time_shares import Spent
from tests.unit.moe_ft.commands.runs import write_run

# 4 ranks, each as a node of its own; sparse windows of 3, rank 3 killed in iteration 9 and repaired.
REAL = Path(__file__).parent / "events"
EVENTS = {rank: [*read_events(event_path(REAL, rank))] for rank in range(4)}


def events(kind: str) -> Iterator[Event]:
    """Yield the events of a kind of all ranks."""
    return (each for own in EVENTS.values() for each in own if each["event"] == kind)


@pytest.fixture(scope="module")
def run() -> ReportedRun:
    return read_run(REAL, all_ranks=True)


@pytest.fixture
def page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return the page of the real run and the text that was printed with it."""
    path = tmp_path / "page.html"
    path.write_text("an older one is replaced")
    assert main(["report", f"{REAL}", "--html", f"{path}"]) == 0
    return path.read_text(), capsys.readouterr().out


def test_page_is_whole_and_takes_nothing_from_elsewhere(page: tuple[str, str]) -> None:
    text, _ = page
    open_tags: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Parser().feed(text)
    assert open_tags == []
    script = re.search("<script>(.*)</script>", text, re.DOTALL)
    assert script and len(script[1].splitlines()) < 100
    body = text.replace(script[0], "")
    root = ElementTree.fromstring(body.replace("<!DOCTYPE html>", ""))
    assert not re.search(r"https?:|@import|url\(|<link|href=.(?!data:image/png;base64)", body)
    assert [each.get("aria-label") for each in root.iter("svg")] == [
        *("where the time went", "timeline of ranks", "loss by iteration", "bytes over time"),
        *(f"load of layer.{layer}" for layer in range(4)),
        "bytes over time",
    ]


@pytest.mark.rest
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_browser_runs_the_script_and_complains_of_nothing(
    page: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "x.html").write_text(page[0])
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/x.html"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=True)
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count('aria-pressed="true"') == len([*SnapshotTier, *Mark])
    assert done.stdout.count('class="pointer"') == 8


def test_page_has_the_numbers_of_the_text(page: tuple[str, str]) -> None:
    text, printed = page
    root = ElementTree.fromstring(re.sub("<script>.*</script>", "", text, flags=re.DOTALL)[15:])
    tables = [
        [["".join(cell.itertext()) for cell in row] for row in table]
        for table in root.iter("table")
    ]
    facts, shares, _, recoveries, repairs, ranks = tables
    for name, value in facts[1:]:
        assert re.search(rf"^{re.escape(name)} +{re.escape(value)}$", printed, re.MULTILINE)
    for use, share in shares[1:]:
        assert re.search(rf"^{use} +{share}$", printed, re.MULTILINE)
    for table in (recoveries, repairs):
        assert all(re.search(r" +".join(map(re.escape, row)), printed) for row in table)
    assert len(recoveries) == len(repairs) == 2
    assert [row[0] for row in ranks[1:]] == ["0", "1", "2", "3"]


def test_time_of_every_rank_is_divided_without_a_rest(run: ReportedRun) -> None:
    for row in run.rows:
        (rank,) = row.ranks
        spent = run.folds[rank].spent.seconds
        times = [each for each in EVENTS[rank] if each["event"] == "iteration"]
        whole_s = times[-1]["time"] - times[0]["time"] + times[0]["iteration_s"]
        assert sum(spent.values()) == pytest.approx(whole_s)
        assert spent[Spent.RECOVERING] > 0.1
        for use in Spent:
            cells = row.busy.get(use, new_cells())
            assert sum(cells) * run.frame.bucket_s == pytest.approx(spent[use])
    assert sum(summarize_run(run, REAL).time_shares[use] for use in Spent) == pytest.approx(1)


def test_death_is_marked_on_its_rank_and_the_repair_on_all(run: ReportedRun) -> None:
    marks = {
        rank: [(mark, text) for (_, mark), (_, text) in sorted(row.marks.items())]
        for row in run.rows
        for rank in row.ranks
    }
    died = ("rank 3 injected kill", "rank 3 died in iteration 9 and was replaced")
    faults = {rank: [each[1] for each in own if each[0] == "fault"] for rank, own in marks.items()}
    assert not any((faults[0], faults[1], faults[2])) and {*faults[3]} <= {*died} and faults[3]
    for rank, own in marks.items():
        assert [each[0] for each in own][-2:] == [Mark.RECOVERY, Mark.REPAIR]
        assert f"rank {rank} is repaired after" in own[-1][1]
    assert {row.name for row in run.rows} == {f"rank {rank} on vm" for rank in range(4)}


def test_loads_are_those_of_all_ranks_and_marked_with_what_the_snapshots_hold(
    run: ReportedRun,
) -> None:
    total = run.total
    for layer in ("layer.0", "layer.3"):
        for iteration in (2, 12):
            loads = [
                each["tokens"][layer]
                for each in events("router_load")
                if each["iteration"] == iteration and layer in each["tokens"]
            ]
            assert total.loads[iteration][layer] == [sum(each) for each in zip(*loads, strict=True)]
        windows = [total.saved[iteration].get(layer, []) for iteration in (10, 11, 12)]
        assert sorted(sum(windows, [])) == [*range(8)], "each expert is once in a window of 3"
        assert all(len(window) < 8 for window in windows)


def test_memory_is_the_most_of_any_rank(run: ReportedRun) -> None:
    most = max(each["resident_bytes"] for each in events("iteration"))
    assert max(run.total.memory["resident"]) == most > 2**28
    assert "device" not in run.total.memory


def test_torn_line_is_left_out_on_every_rank(tmp_path: Path) -> None:
    shutil.copytree(REAL, tmp_path, dirs_exist_ok=True)
    whole = read_run(tmp_path, all_ranks=True)
    for rank in (0, 2):
        with event_path(tmp_path, rank).open("a") as file:
            file.write('{"time": 1.0, "rank": 0, "incarnation": 1, "event": "iter')
    torn = read_run(tmp_path, all_ranks=True)
    assert torn.left_out == ("2 lines that are no events, such as a killed rank leaves",)
    report = summarize_run(torn, tmp_path)
    assert report.time_shares == summarize_run(whole, tmp_path).time_shares
    assert "left out: 2 lines" in as_html(torn, tables_of(report))


def test_processes_read_what_one_process_reads(
    run: ReportedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report_run, "_FEW_BYTES", 0)
    shared = read_run(REAL, all_ranks=True)
    assert shared.total == run.total
    assert summarize_run(shared, REAL) == summarize_run(run, REAL)


def test_sampling_keeps_the_time_and_leaves_whole_lines_out(tmp_path: Path) -> None:
    seconds = []
    for every in (1, 4):
        fold = RankFold(rank=3)
        fold.read(sampled(read_lines(event_path(REAL, 3)), every, 1))
        seconds.append(fold.spent.seconds)
    for use in (Spent.PRODUCTIVE, Spent.RECOVERING):
        assert seconds[1][use] == pytest.approx(seconds[0][use], rel=0.02)
    head = b'{"time": 1.5, "rank": 0, "incarnation": 0, "event": '

    def kept(*lines: bytes) -> list[int]:
        return [lines.index(each) for each in sampled(lines, 4, 5)]

    first, other, fourth = (
        head + b'"iteration", "iteration": %d, "x": 1}\n' % n for n in (5, 6, 8)
    )
    start, end = (head + b'"%s", "iteration": 6, "x": 1}\n' % kind for kind in (b"start", b"end"))
    loads = [head + b'"router_load", "iteration": %d, "x": 1}\n' % n for n in (7, 10)]
    assert kept(start, first, other, fourth, *loads) == [0, 1, 3, 5]
    assert kept(first, other, end) == [0, 1, 2], "the last one of a start"
    assert kept(first, other[:-2]) == [0, 1], "a torn line is counted"


def test_many_ranks_share_rows_by_node_or_in_order(tmp_path: Path) -> None:
    for rank in range(66):
        log = write_run(tmp_path, rank, [])
        log.write("start", 0, host=f"node{rank // 8}")
        log.write("iteration", 1, iteration_s=1.0, num_tokens=1, loss=None, resident_bytes=rank)
        log.close()
        text = event_path(tmp_path, rank).read_text().splitlines()[1:]
        event_path(tmp_path, rank).write_text("\n".join(text))
    run = read_run(tmp_path, all_ranks=True)
    assert [row.name for row in run.rows][::8] == ["node0 ranks 0-7", "node8 ranks 64-65"]
    assert [len(row.ranks) for row in run.rows] == [8] * 8 + [2]
    assert max(run.total.memory["resident"]) == 65
    for rank in range(66):
        path = event_path(tmp_path, rank)
        path.write_text(path.read_text().replace(f'"node{rank // 8}"', '"one"'))
    names = [row.name for row in read_run(tmp_path, all_ranks=True).rows]
    assert names[0] == "ranks 0-1" and len(names) == 33


def test_run_without_checkpoints_losses_and_loads_has_a_page_that_says_so(tmp_path: Path) -> None:
    log = write_run(tmp_path, 0, [])
    log.write("iteration", 1, iteration_s=1.0, num_tokens=1, loss=None)
    log.write("stopped", 1, phase="forward", reason="<b>\x00 & \udcff", silent_ranks=[])
    page = tmp_path / "x.html"
    assert main(["report", f"{tmp_path}", "--html", f"{page}"]) == 0
    text = page.read_text()
    for words in ("has no losses", "No snapshot", "There were none", "--moe-ft-router-log"):
        assert words in text
    assert "&lt;b&gt;" in text and "<b>" not in text


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing/x.html", "must be in a folder that exists. Make it"),
        ("folder", "must be a file, and it is something else. Name a file"),
        ("device", "must be a file, and it is something else. Name a file"),
    ],
)
def test_file_that_cannot_be_written_is_refused(
    file: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    assert main(["report", f"{REAL}", "--html", f"{tmp_path / file}"]) == 2
    error = capsys.readouterr().err
    assert f"--html={tmp_path / file}" in error and message in error


def test_directory_without_events_is_refused_before_a_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", f"{tmp_path}", "--html", f"{tmp_path / 'x.html'}"]) == 2
    assert "Give the directory that --moe-ft-event-log named" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_replicas_of_earlier_versions_count_once_for_each_peer(tmp_path: Path) -> None:
    log = write_run(tmp_path, 0, [5.0])
    log.write("replicate", 1, seconds=0.1, num_units=1, bytes=10, peers=[1, 2])
    assert read_run(tmp_path, all_ranks=True).tiers[SnapshotTier.PEERS].num_bytes == 20


def test_span_fills_the_buckets_that_it_covers_and_no_others() -> None:
    frame, cells = Frame(first_s=100.0, last_s=628.0, last_iteration=1), new_cells()
    assert frame.spread(cells, 101.5, 103.25) == 3
    assert [*cells[:5]] == [0, 0.5, 1, 0.25, 0]
    cells = new_cells()
    for begin_s, end_s in ((0.0, 50.0), (float("nan"), float("nan")), (1e300, 5.0), (700.0, 9e99)):
        frame.spread(cells, begin_s, end_s)
    assert sum(cells) < 1e-9
    frame.spread(cells, 0.0, 1e9)
    assert [*cells] == pytest.approx([1.0] * 528)


def test_sums_of_ranks_do_not_depend_on_their_order() -> None:
    parts = [*read_run(REAL, all_ranks=True).rows]
    sums = TimelineRow(frame=parts[0].frame), TimelineRow(frame=parts[0].frame)
    for part, other in zip(parts, reversed(parts), strict=True):
        sums[0].add(part)
        sums[1].add(other)
    assert sums[0].loads == sums[1].loads and sums[0].saved == sums[1].saved
    assert len(sums[0].ranks) == 4
