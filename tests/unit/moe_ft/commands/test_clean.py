"""`clean` removes nothing that it should leave, and answers bad input with its reason."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.unit.moe_ft.commands.bad_input import (
    Case,
    cases_of,
    check_answer,
    made,
    then_closed,
    then_open,
    written,
)
from tests.unit.moe_ft.commands.damaged import in_memory, persisted

CASES = {
    "no directory": Case("--memory-dir /nonexistent/x", "ok"),
    "file": Case("--memory-dir DIR/x", "error", written("x", "x")),
    "age in words": Case("--older-than abc", "error"),
    "age that is no number": Case("--memory-dir DIR --older-than nan", "error", made("job/n0")),
    "negative age": Case("--memory-dir DIR --older-than -5", "error", made("job/n0")),
    "unknown job": Case("--memory-dir DIR --job-id nope", "error", in_memory()),
    "persist directory": Case("--memory-dir DIR --older-than 0", "kept", persisted()),
    "memory of another user": Case(
        "--memory-dir DIR --older-than 0", "kept", then_open(in_memory()), by_nobody=True
    ),
    "unreadable directory": Case(
        "--memory-dir DIR", "error", then_closed(in_memory()), by_nobody=True
    ),
}


@cases_of("clean --remove", CASES)
def test_bad_input_is_answered_with_its_reason(
    case: Case, directory: Path, nobody: Callable[[], ProcessPoolExecutor]
) -> None:
    check_answer(case, directory, nobody)
