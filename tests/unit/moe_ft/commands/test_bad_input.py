"""Bad input to commands of ``python -m moe_ft``: an answer, never a traceback."""

import io
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_ft.cli import main
from tests.unit.moe_ft.commands.damaged import (
    Act,
    empty_region,
    file_of,
    flip,
    in_memory,
    manifest,
    manifest_of,
    nest,
    persisted,
    pool_of,
    replace_by_directory,
    seal,
    touch_gap,
)
from tests.unit.moe_ft.planning.described import LARGE_OF_8

NOBODY = 65534
DEADLINE_S = 120.0


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


START = '{"event":"start","iteration":0,"incarnation":0,"time":1}\n'
GARBAGE = bytes((7 * byte) % 256 for byte in range(4000))
_CLEAN = {
    "no directory": Case("--memory-dir /nonexistent/x", "ok"),
    "age in words": Case("--older-than abc", "error"),
    "persist directory": Case("--memory-dir DIR --older-than 0", "kept", persisted()),
    "memory of another user": Case(
        "--memory-dir DIR --older-than 0", "kept", then_open(in_memory()), by_nobody=True
    ),
    "unreadable directory": Case(
        "--memory-dir DIR", "error", then_closed(in_memory()), by_nobody=True
    ),
}

_INSPECT = {
    "no directory": Case("/nonexistent/x", "error"),
    "empty directory": Case("DIR", "error"),
    "file": Case("DIR/x", "error", written("x", "x")),
    "unknown protocol": Case("foo://bar/x", "error"),
    "protocol whose package is missing": Case("s3://bucket/x", "error"),
    "web page": Case("http://127.0.0.1:9/x", "error"),
    "empty string": Case("''", "error"),
    "garbage for a manifest": Case(
        "DIR", "ok", persisted(lambda path: manifest_of(path).write_bytes(GARBAGE))
    ),
    "unit of an unknown kind": Case(
        "DIR",
        "error",
        manifest(lambda body: body["units"].update({"layer.x": body["units"]["embedding"]})),
    ),
    "later format": Case("DIR", "ok", manifest(lambda body: body.update(format="moe_ft/99"))),
    "manifest without files": Case("DIR", "ok", manifest(lambda body: body.update(files=[]))),
    "torn index of a region": Case(
        "DIR", "ok", in_memory(lambda rank: os.truncate(rank / "region_0.json", 400))
    ),
    "directory of another user": Case("DIR", "error", then_closed(persisted()), by_nobody=True),
    "manifest of another user": Case(
        "DIR", "ok", persisted(lambda path: manifest_of(path).chmod(0o600)), by_nobody=True
    ),
    "checkpoint that is a file": Case(
        "DIR", "ok", persisted(lambda path: path.with_name("iter_0000020").write_text("x"))
    ),
    "nested brackets for a manifest": Case(
        "DIR",
        "ok",
        persisted(lambda path: seal(manifest_of(path), b"[" * 200_000 + b"]" * 200_000)),
    ),
    "nested brackets in a manifest": Case("DIR", "ok", persisted(nest)),
}

_PRUNE = {
    "no directory": Case("/nonexistent/x --keep 1", "error"),
    "empty name": Case("'' --keep 1", "error"),
    "file": Case("DIR/x --keep 1", "error", written("x", "x")),
    "memory directory": Case("DIR --keep 1", "error", in_memory()),
    "none to keep": Case("DIR --keep 0", "error", persisted()),
    "every minus one": Case("DIR --keep 1 --every -1", "error", persisted()),
    "days that are no number": Case("DIR --keep 1 --days nan", "error", persisted()),
    "unknown protocol": Case("nosuch://x/y --keep 1", "error"),
}

_REPORT = {
    "file": Case("DIR/x", "error", written("x", "x")),
    "garbage": Case("DIR", "error", written(GARBAGE)),
    "empty log": Case("DIR", "error", written("")),
    "log of another user": Case("DIR", "error", written(START, mode=0o600), by_nobody=True),
    "directory of another user": Case("DIR", "error", then_closed(written(START)), by_nobody=True),
    "log that is a directory": Case("DIR", "error", made("rank_00000.jsonl")),
}

_VERIFY = {
    "no argument": Case("", "error"),
    "data cut off": Case(
        "DIR", "wrong", persisted(lambda path: os.truncate(file_of(path, 1), 5000))
    ),
    "impossible header": Case("DIR", "wrong", persisted(lambda path: flip(file_of(path, 0), 7))),
    "data that is a directory": Case(
        "DIR", "wrong", persisted(lambda path: replace_by_directory(file_of(path, 1)))
    ),
    "missing index": Case(
        "DIR", "wrong", persisted(lambda path: file_of(path, 1, "json").unlink())
    ),
    "path that leaves the directory": Case(
        "DIR", "wrong", manifest(lambda body: body["files"][0].update(data="../../etc/passwd"))
    ),
    "byte between units": Case("DIR", "ok", in_memory(touch_gap)),
    "nothing wrong": Case("DIR", "ok", in_memory()),
    "impossible header of a pool": Case(
        "DIR", "wrong", in_memory(lambda rank: flip(pool_of(rank), 5))
    ),
    "empty pool": Case("DIR", "wrong", in_memory(lambda rank: os.truncate(pool_of(rank), 0))),
    "no pool": Case("DIR", "wrong", in_memory(lambda rank: pool_of(rank).unlink())),
    "empty region": Case("DIR", "wrong", in_memory(empty_region)),
    "data of another user": Case(
        "DIR", "wrong", persisted(lambda path: file_of(path, 1).chmod(0o600)), by_nobody=True
    ),
}
_GOOD = "--world-size 16 --iteration-s 0.5 --bandwidth 2GB --network-bandwidth 2GB --mtbf-s 1800"
_FLAGS = f"-- {' '.join(LARGE_OF_8)} --moe-ft-strategy"
_BAD_OPTIONS = (
    *("--world-size -1", "--world-size abc", "--world-size 12", "--iteration-s 0"),
    *("--iteration-s nan", "--iteration-s inf", "--bandwidth abc", "--bandwidth 0"),
    *("--mtbf-s 0", "--mtbf-s -5", "--mtbf-s nan", "--restart-s -1", "--update-s 9"),
)
_PLANNED = ("partial", "sparse")
_BAD_FLAGS = ("foo", "sparse --moe-ft-window 0", "sparse --expert-model-parallel-size 3")
_PLAN = {
    **{f"nothing wrong, {name}": Case(f"{_GOOD} {_FLAGS} {name}", "ok") for name in _PLANNED},
    "nothing": Case("", "error"),
    **{option: Case(f"{_GOOD} {option} {_FLAGS} sparse", "error") for option in _BAD_OPTIONS},
    **{flags: Case(f"{_GOOD} {_FLAGS} {flags}", "error") for flags in _BAD_FLAGS},
    "window of too many snapshots": Case(f"{_GOOD} {_FLAGS} sparse --moe-ft-window 1000", "ok"),
}
CASES = {
    f"{command.partition(' ')[0]}, {name}": replace(case, command=f"{command} {case.command}")
    for command, cases in {
        "clean --remove": _CLEAN,
        "inspect": _INSPECT,
        "plan": _PLAN,
        "prune --remove": _PRUNE,
        "report": _REPORT,
        "verify": _VERIFY,
    }.items()
    for name, case in cases.items()
}


@pytest.fixture(scope="module")
def nobody_process() -> Iterator[ProcessPoolExecutor]:
    """Yield a process of another user, in which a command can be run."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork, initializer=become_nobody) as process:
        yield process


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty directory, the current one, that every user can look into, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        monkeypatch.chdir(name)
        yield Path(name)


@pytest.fixture
def nobody(request: pytest.FixtureRequest) -> Callable[[], ProcessPoolExecutor]:
    """Return a function that returns the process of another user, started when it is needed."""
    return lambda: request.getfixturevalue("nobody_process")


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_bad_input_is_answered_with_its_reason(
    case: Case, directory: Path, nobody: Callable[[], ProcessPoolExecutor]
) -> None:
    case.prepare(directory)
    before = set(directory.rglob("*"))
    words = tuple(word.replace("DIR", str(directory)).strip("'") for word in case.command.split())
    answer = nobody().submit(run, words).result(DEADLINE_S) if case.by_nobody else run(words)
    says_why = re.search(r"^(moe_ft.*: )?error: \S", answer.err, re.MULTILINE)
    is_error = answer.code == 2 and says_why is not None
    is_wrong = answer.code == 1 and re.search(r"^WRONG", answer.out, re.MULTILINE) is not None
    assert {
        "ok": answer.code == 0,
        "error": is_error,
        "wrong": is_wrong or is_error,
        "kept": (answer.code == 0 or is_error) and before <= set(directory.rglob("*")),
    }[case.answer], answer
