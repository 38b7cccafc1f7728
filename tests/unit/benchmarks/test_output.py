"""Options that all benchmarks have, and pages that say of which commit their figures are."""

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks import output
from benchmarks.output import STAMP, parse_options, show, stamp


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    return parse_options(parser, words, mib=8, repeats=1)


def test_quick_changes_sizes_but_those_that_are_named() -> None:
    usual, quick, named = options_of(), options_of("--quick"), options_of("--quick", "--mib", "16")
    assert (usual.mib, usual.repeats) == (512, 5)
    assert (quick.mib, quick.repeats) == (8, 1)
    assert (named.mib, named.repeats) == (16, 1)


def test_page_of_a_quick_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of("--quick", "--output", "page.md")
    assert "--output does not go with --quick" in capsys.readouterr().err


def test_page_keeps_its_head_and_is_stamped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, line = tmp_path / "page.md", "Figures of commit `89abcdef`, 2026-11-24."
    page.write_text("# Title\n\nWords.\n\nFigures of commit `0123456`, 2026-11-20.\n\nold table\n")
    monkeypatch.setattr(output, "stamp", lambda: line)
    show(["conditions", "table"], page)
    assert page.read_text() == f"# Title\n\nWords.\n\n{line}\n\nconditions\n\ntable\n"


def test_new_page_begins_with_what_the_benchmark_says_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "Figures of commit `89abcdef`, 2026-11-24."
    monkeypatch.setattr(output, "stamp", lambda: line)
    monkeypatch.setattr(
        sys.modules["__main__"], "__doc__", "Cost of it.\n\n    command\n\nWords.\n"
    )
    show(["table"], tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page == f"# Cost of it\n\n    command\n\nWords.\n\n{line}\n\ntable\n"
    found = STAMP.search(page)
    assert found
    assert found.groups() == ("89abcdef", "2026-11-24")


def test_stamp_names_the_commit_and_the_day() -> None:
    if not (output.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert STAMP.fullmatch(stamp())
