"""Rows are folded without hiding a warning, and the exit code follows from them."""

import threading
import time

import pytest

from moe_ft.doctor.rows import (
    CheckRow,
    Result,
    exit_code,
    failed,
    fold,
    guarded,
    passed,
    rate_text,
    refused,
    render,
    warned,
)
from moe_ft.errors import ConfigError

GOOD, WARNING, BAD = (
    passed("a", "n0", "x"),
    warned("a", "n0", "x", "y"),
    failed("a", "n0", "x", "y"),
)


def test_rows_with_the_same_text_are_one_for_all_places() -> None:
    rows = [passed("disk", "n0", "big"), passed("disk", "n1", "big"), passed("disk", "n2", "small")]
    assert fold(rows) == [passed("disk", "n0, n1", "big"), passed("disk", "n2", "small")]


def test_of_many_places_three_are_named() -> None:
    (row,) = fold(passed("disk", f"n{number}", "big") for number in range(5))
    assert row.where == "n0, n1, n2 and 2 more"


def test_of_many_rows_that_pass_one_is_shown_and_all_others_stay() -> None:
    rows = [passed("rate", f"n{number}", f"{number} MB/s") for number in range(9)]
    slow = warned("rate", "n9", "slow", "wait")
    example = passed("rate", "9 places", "for example n0: 0 MB/s")
    assert fold([*rows, slow]) == [slow, example]


def test_checks_stay_in_their_order() -> None:
    rows = [passed("b", "n0", "x"), passed("a", "n0", "x"), warned("b", "n1", "y", "z")]
    assert [row.check for row in fold(rows)] == ["b", "b", "a"]


@pytest.mark.parametrize(
    ("rows", "strict", "code"),
    [
        ([GOOD], True, 0),
        ([GOOD, WARNING], False, 0),
        ([GOOD, WARNING], True, 1),
        ([GOOD, BAD], False, 1),
    ],
)
def test_exit_code_tells_failures_and_if_strict_warnings(
    rows: list[CheckRow], strict: bool, code: int
) -> None:
    assert exit_code(rows, strict=strict) == code


def test_table_has_every_row_and_counts_results() -> None:
    text = render([GOOD, WARNING, BAD])
    assert text.endswith("1 pass, 1 warn, 1 fail")
    assert [word for word in ("PASS", "WARN", "FAIL") if word in text] == ["PASS", "WARN", "FAIL"]


def test_check_that_raises_is_a_failure_with_the_reason() -> None:
    def act() -> list[CheckRow]:
        raise OSError("no disk")

    (row,) = guarded("disk", "n0", act, time.monotonic() + 30)
    assert (row.result, row.found) == (Result.FAIL, "OSError: no disk")


def test_check_that_hangs_is_given_up() -> None:
    never = threading.Event()
    (row,) = guarded("disk", "n0", lambda: [GOOD] * never.wait(), time.monotonic())
    never.set()
    assert row.result is Result.FAIL
    assert "did not return" in row.found


def test_refusal_is_divided_into_finding_and_remedy() -> None:
    row = refused("disk", "n0", ConfigError("--x=1 must be 2. Give 2. Or 3."), Result.WARN)
    assert (row.result, row.found, row.remedy) == (Result.WARN, "--x=1 must be 2", "Give 2. Or 3.")


def test_rates_have_a_unit_that_fits() -> None:
    assert rate_text(2_500_000_000, 1.0) == "2.50 GB/s"
    assert rate_text(50_000_000, 2.0) == "25 MB/s"
