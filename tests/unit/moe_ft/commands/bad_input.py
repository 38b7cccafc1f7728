"""Bad input to commands of ``python -m moe_ft``, for their tests: an answer, never a traceback."""

import io
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_ft.cli import main

NOBODY = 65534
DEADLINE_S = 120.0
Act = Callable[[Path], object]


class Answer(NamedTuple):
    """Exit code of a command, and what it printed."""

    code: object
    out: str
    err: str


def run(words: tuple[str, ...]) -> Answer:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: object = main(words)
        except SystemExit as end:  # of argparse
            code = end.code
    return Answer(code, out.getvalue(), err.getvalue())


def become_nobody() -> None:
    """Give up being root."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


@dataclass(frozen=True)
class Case:
    """A command, and what is there when it runs.

    Attributes:
        command: its words; "DIR" stands for the directory.
        answer: "ok": exit code 0. "error": 2, with a line that says why. "wrong": 1, with a line that says
            what is wrong, or an error. "kept": as ok or error, and no file is gone.
        prepare: fills the directory.
        by_nobody: whether another user runs it.
    """

    command: str
    answer: str
    prepare: Act = lambda directory: None
    by_nobody: bool = False


def cases_of(command: str, cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    """Return what makes a test run once for each case of a command."""
    found = [
        pytest.param(replace(case, command=f"{command} {case.command}"), id=name)
        for name, case in cases.items()
    ]
    return pytest.mark.parametrize("case", found)


def check_answer(case: Case, directory: Path, nobody: Callable[[], ProcessPoolExecutor]) -> None:
    """Run a case in a directory that it prepares; fail unless its answer is the right one.

    Args:
        case: to run.
        directory: empty.
        nobody: returns a process of another user.
    """
    case.prepare(directory)
    before = set(directory.rglob("*"))
    words = tuple(word.replace("DIR", str(directory)).strip("'") for word in case.command.split())
    answer = nobody().submit(run, words).result(DEADLINE_S) if case.by_nobody else run(words)
    says_why = re.search(r"^(python -m moe_ft.*: )?error: \S", answer.err, re.MULTILINE)
    is_error = answer.code == 2 and says_why is not None
    is_wrong = answer.code == 1 and re.search(r"^WRONG", answer.out, re.MULTILINE) is not None
    assert {
        "ok": answer.code == 0,
        "error": is_error,
        "wrong": is_wrong or is_error,
        "kept": (answer.code == 0 or is_error) and before <= set(directory.rglob("*")),
    }[case.answer], answer


def made(*names: str) -> Act:
    """Return what makes directories."""

    def prepare(directory: Path) -> None:
        for name in names:
            (directory / name).mkdir(parents=True)

    return prepare


def written(content: str | bytes, name: str = "rank_00000.jsonl", mode: int = 0o644) -> Act:
    """Return what writes a file."""

    def prepare(directory: Path) -> None:
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)
        (directory / name).chmod(mode)

    return prepare


def then_closed(prepare: Act) -> Act:
    """Return what prepares the directory and closes it to other users."""

    def prepare_and_close(directory: Path) -> None:
        prepare(directory)
        directory.chmod(0o700)

    return prepare_and_close


def then_open(prepare: Act) -> Act:
    """Return what prepares the directory and opens its upper levels to other users."""

    def prepare_and_open(directory: Path) -> None:
        prepare(directory)
        for path in (directory, directory / "job"):
            path.chmod(0o755)

    return prepare_and_open
