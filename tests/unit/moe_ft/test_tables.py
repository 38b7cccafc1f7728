"""Tables and progress bars in the one form of all commands: nothing is cut off, and a pipe gets no bar."""

import io
from random import Random

import pytest

from moe_ft.bars import progress_bar
from moe_ft.tables import table

ROWS = [("a", 1, None), ("b [bold]", "22.5", "a remedy of two-and-more words\nand a second line")]


def test_columns_are_aligned_below_a_rule_and_numbers_stand_to_the_right() -> None:
    assert table(ROWS, ("name", "value", "remedy")).splitlines() == [
        "name      value  remedy",
        "-----------------------------------------------",
        "a             1",
        "b [bold]   22.5  a remedy of two-and-more words",
        "                 and a second line",
    ]


def test_table_without_headers_has_no_rule() -> None:
    assert table([("a", "1"), ("bcd", "e")]) == "a    1\nbcd  e"


def test_table_without_rows_is_its_header() -> None:
    assert table([], ("a", "b")) == "a  b\n----"


def test_nothing_is_cut_off_however_long_it_is() -> None:
    long = "word " * 2000 + "/a/path/without/a/space" * 400
    assert f"a  {long}" in table([("a", long)], ("a", "b"))


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_cells_are_wrapped_where_a_width_is_given_and_no_letter_is_lost(width: int) -> None:
    for seed in range(30):
        random = Random(f"{width}/{seed}")
        words = ["".join(random.choices("abcdef", k=random.randint(1, 7))) for _ in range(99)]
        rows = [[" ".join(random.choices(words, k=random.randint(1, 20)))] * 4 for _ in range(3)]
        lines = table(rows, words[:4], width=width).splitlines()
        assert max(map(len, lines)) <= width
        given = "".join([*words[:4], *("".join(row) for row in rows)]).replace(" ", "")
        assert sorted("".join(lines).replace(" ", "").replace("-", "")) == sorted(given)


def test_words_are_broken_only_where_they_do_not_fit() -> None:
    word = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert word in table([("a " * 60, f"give {word} " * 2)], ("found", "remedy"), width=80)


def test_progress_bar_is_shown_in_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        with progress_bar("reading", 100, in_bytes=True) as bar:
            bar.advance(40, "a [note]")
            bar.reach(100)
        shown[stream.isatty()] = stream.getvalue()
    assert shown[False] == "" or shown[False].isspace()
    assert "reading" in shown[True] and "a [note]" in shown[True] and "100/100 bytes" in shown[True]
