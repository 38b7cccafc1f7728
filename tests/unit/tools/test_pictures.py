"""Pictures of the documentation: the committed ones are what the scripts draw, with all text inside."""

import json
import re
from xml.etree import ElementTree

import pytest

from moe_ft.commands.plan import advisor_of
from tests.unit.source import text_files, text_of
from tools.pictures import choices
from tools.pictures.__main__ import FOLDER, PICTURES
from tools.pictures.plots import Measured, measured, table_with
from tools.pictures.recording import choose_repair
from tools.pictures.svg import Drawing


@pytest.mark.parametrize("name", PICTURES)
def test_committed_picture_is_what_its_script_draws_now(name: str) -> None:
    drawn = PICTURES[name]().render()
    ElementTree.fromstring(drawn)
    message = "run `python -m tools.pictures`, and look at what has changed"
    assert (FOLDER / f"{name}.svg").read_text() == drawn, message


def test_every_picture_is_drawn_by_a_script_and_shown_by_a_page() -> None:
    pages = "\n".join(text_of(path) for path in text_files() if path.endswith(".md"))
    shown = {*re.findall(r"pictures/(\w+)\.svg", pages)}
    assert {path.stem for path in FOLDER.glob("*.svg")} == {*PICTURES} == shown


def test_text_that_leaves_the_picture_is_refused() -> None:
    drawing = Drawing(100, 40, "title", "description")
    drawing.text(10, 20, "fits")
    with pytest.raises(ValueError, match="leaves the picture"):
        drawing.text(60, 20, "does not fit")
    with pytest.raises(ValueError, match="of 20 pixels"):
        drawing.label(30, 10, 24, 20, "panel", ["wide"])


def test_text_of_a_picture_is_escaped() -> None:
    drawing = Drawing(100, 40, "a < b", "")
    drawing.text(10, 20, "<x>")
    assert "<x>" not in drawing.render()
    ElementTree.fromstring(drawing.render())


def test_number_of_a_table_has_its_range() -> None:
    assert measured("1,021.5 (-0.1 to 2,000)") == Measured(
        text="1,021.5 (-0.1 to 2,000)", middle=1021.5, low=-0.1, high=2000
    )
    with pytest.raises(LookupError, match="no measured number"):
        measured("-")


def test_plot_of_a_table_that_is_gone_is_refused() -> None:
    with pytest.raises(LookupError, match="no table of stall.md has the columns"):
        table_with("stall.md", "candidate", "a column that nothing has")


def test_recorded_repair_begins_with_the_death_and_ends_with_the_last_rank() -> None:
    def rank(
        pids: list[int], repaired_at: float, *, is_replacement: bool
    ) -> list[dict[str, object]]:
        repair = {
            "event": "repair",
            "time": repaired_at,
            "seconds": repaired_at - 100.0,
            "is_replacement": is_replacement,
            "phases_s": {"meet": 1.0},
            "dead_ranks": [1],
            "broken_iteration": 4,
            "recovered_iteration": 4,
        }
        starts = [{"event": "start", "time": 90.0, "pid": pid} for pid in pids]
        iteration = {"event": "iteration", "iteration": 4, "time": 99.5, "iteration_s": 0.5}
        return [*starts, iteration, repair]

    found = choose_repair(
        {0: rank([7, 7], 101.0, is_replacement=False), 1: rank([8, 9], 101.5, is_replacement=True)}
    )
    assert [each["kept_its_process"] for each in found["ranks"]] == [True, False]
    assert [each["done"] for each in found["ranks"]] == [1.0, 1.5]
    assert found["ranks"][0]["iterations"] == [[4, -1.0, -0.5]]


@pytest.mark.rest
def test_map_of_strategies_is_what_the_planner_says_now() -> None:
    name = "deepseek-moe-16b"
    advisor = advisor_of(["--model", name, "--cluster", choices.CLUSTER])
    cells = json.loads(choices.RECORD.read_text())["models"][name]["cells"]
    speeds, times = choices.BANDWIDTHS_GB, [*choices.MTBFS_S.values()]
    for row, column in ((0, 0), (0, 1), (3, 4), (3, 5), (6, 12)):
        cell = choices.ask(advisor, speeds[column], times[row])
        assert [cell.strategy, cell.gain] == cells[row * len(speeds) + column]


def test_recordings_say_the_command_that_made_them() -> None:
    for path in FOLDER.glob("*.json"):
        assert re.search(r'"command": ".*--moe-ft-strategy', path.read_text()), path
