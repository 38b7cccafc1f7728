"""Pictures of the documentation: the committed ones are what the scripts draw, with all text inside."""

import json
import re
from xml.etree import ElementTree

import pytest

from moe_ft.commands.plan import advisor_of
from tests.unit.source import text_files, text_of
from tools.pictures import choices
from tools.pictures.__main__ import FOLDER, PICTURES
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
