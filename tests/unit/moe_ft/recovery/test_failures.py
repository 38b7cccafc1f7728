"""States from which starts have failed: two that are the same exclude one."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from moe_ft.recovery.failures import (
    Attempt,
    describe,
    failed_locally,
    failed_too_often,
    note_attempt,
    read_attempts,
)


def attempt(
    by: str, failure: str = "recovery: ValueError: bad", *, iteration: int = 7, start: str = "s"
) -> Attempt:
    return Attempt(start=start, iteration=iteration, failure=failure, by=by)


def test_two_starts_that_failed_in_the_same_way_exclude_the_state() -> None:
    failed = failed_too_often([attempt("a"), attempt("b")])
    assert failed == {("s", 7): "recovery: ValueError: bad"}


@pytest.mark.parametrize(
    "other",
    [
        attempt("a"),
        attempt("b", "recovery: ValueError: worse"),
        attempt("b", iteration=6),
        attempt("b", start="t"),
    ],
    ids=["by the same start", "otherwise", "from another iteration", "from another branch"],
)
def test_two_failures_that_are_not_the_same_exclude_nothing(other: Attempt) -> None:
    assert failed_too_often([attempt("a"), other]) == {}


def test_failure_for_the_logs_excludes_a_local_recovery_at_once_and_never_the_state() -> None:
    found = [replace(attempt(by), is_local=True) for by in ("a", "b")]
    assert failed_locally(found[:1]) == {("s", 7): "recovery: ValueError: bad"}
    assert failed_too_often(found) == {}
    assert failed_locally([attempt("a"), attempt("b")]) == {}


def test_notes_of_a_version_without_local_recoveries_are_read(tmp_path: Path) -> None:
    (tmp_path / "failed_00000.json").write_text(
        '[{"start": "s", "iteration": 7, "failure": "recovery: ValueError: bad", "by": "a"}]'
    )
    assert read_attempts(tmp_path) == [attempt("a")]


def test_failures_that_the_ranks_of_a_node_have_noted_are_read_together(tmp_path: Path) -> None:
    note_attempt(tmp_path, 0, attempt("a"))
    note_attempt(tmp_path, 1, attempt("a"))
    note_attempt(tmp_path, 0, attempt("b"))
    assert [each.by for each in read_attempts(tmp_path)] == ["a", "b", "a"]


@pytest.mark.parametrize(
    "content", [b"", b"[{", b'[{"surprise": 1}]', b"\xff\xfe", b'[{"start": "\xff"}]']
)
def test_notes_that_cannot_be_read_are_ignored_and_replaced(tmp_path: Path, content: bytes) -> None:
    note_attempt(tmp_path, 1, attempt("a"))
    (tmp_path / "failed_00000.json").write_bytes(content)
    assert [each.by for each in read_attempts(tmp_path)] == ["a"]
    note_attempt(tmp_path, 0, attempt("b"))
    assert [each.by for each in read_attempts(tmp_path)] == ["b", "a"]


def test_node_that_has_noted_nothing_has_no_failures(tmp_path: Path) -> None:
    assert read_attempts(tmp_path / "missing") == []


def test_only_the_latest_failures_of_a_rank_are_kept(tmp_path: Path) -> None:
    for number in range(40):
        note_attempt(tmp_path, 0, attempt(str(number)))
    assert [each.by for each in read_attempts(tmp_path)] == [str(each) for each in range(8, 40)]


def test_failure_is_described_by_its_kind_and_the_first_line_cut_off() -> None:
    assert describe(ValueError("bad\ndetails of this time")) == "ValueError: bad"
    assert describe(ValueError()) == "ValueError: "
    assert len(describe(ValueError("x" * 10_000))) == 200
