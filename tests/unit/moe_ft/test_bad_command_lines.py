"""Bad input to every command of ``python -m moe_ft``: an answer, never a traceback."""

import io
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe_ft.cli import main
from moe_ft.engine.pool import Pool
from moe_ft.engine.storage import Storage
from moe_ft.format.encoding import checksum
from tests.unit.moe_ft.builders import (
    add_units,
    fill_region,
    make_identity,
    persist_checkpoint,
    put_in_slot,
)

NOBODY = 65534
DEADLINE_S = 60.0
Act = Callable[[Path], object]


class Answer(NamedTuple):
    """How a command ended and what it printed."""

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


@pytest.fixture(scope="module")
def nobody() -> Iterator[ProcessPoolExecutor]:
    """Yield a process of another user, in which a command can be run."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork, initializer=become_nobody) as process:
        yield process


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield an empty directory that every user can look into, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


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


def change(path: Path, update: Callable[[Any], object]) -> None:
    """Change the body of an index or manifest, and make its checksum right."""
    body = json.loads(path.read_bytes())["body"]
    update(body)
    seal(path, json.dumps(body).encode())


def seal(path: Path, body: bytes) -> None:
    """Write a body with its checksum."""
    path.write_bytes(b'{"xxh3_64":"%s","body":%s}\n' % (checksum(body).encode(), body))


def flip(path: Path, position: int) -> None:
    """Flip a bit of a byte."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def persisted(damage: Act = lambda iteration: None) -> Act:
    """Return what makes a checkpoint of two ranks and damages its directory."""

    def prepare(directory: Path) -> None:
        persist_checkpoint(Storage(str(directory)), 10, make_identity(world_size=2))
        damage(directory / "iter_0000010")

    return prepare


def manifest_of(iteration: Path) -> Path:
    """Return the path of a checkpoint's only manifest."""
    (path,) = iteration.glob("manifest*.json")
    return path


def manifest(update: Callable[[Any], object]) -> Act:
    """Return what makes a checkpoint whose manifest has been changed."""
    return persisted(lambda iteration: change(manifest_of(iteration), update))


def file_of(iteration: Path, rank: int, suffix: str = "safetensors") -> Path:
    """Return the path of a rank's file."""
    (path,) = iteration.glob(f"rank_{rank:05d}_*.{suffix}")
    return path


def swap_ranks(body: Any) -> None:
    for file in body["files"]:
        file["rank"] = 1 - file["rank"]


def nest(iteration: Path) -> None:
    """Put brackets in brackets in brackets into a value that may have any type."""
    body = json.loads(manifest_of(iteration).read_bytes())["body"]
    body["identity"]["fingerprint"]["--seed"] = "HERE"
    text = json.dumps(body).replace('"HERE"', "[" * 100_000 + "]" * 100_000)
    seal(manifest_of(iteration), text.encode())


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def in_memory(damage: Act = lambda rank: None) -> Act:
    """Return what makes a region with a pool and damages its directory."""

    def prepare(directory: Path) -> None:
        rank = directory / "job/node-a/rank_00000"
        region, index = fill_region(rank)
        pool = Pool(rank, 256, 4)
        pool.open()
        add_units(region, index, dict([put_in_slot(pool, 1, 0)]))
        damage(rank)

    return prepare


def pool_of(rank: Path) -> Path:
    """Return the path of the pool."""
    (path,) = rank.glob("pool_*.safetensors")
    return path


def touch_gap(rank: Path) -> None:
    """Change a byte that lies between units."""
    body = json.loads((rank / "region_0.json").read_bytes())["body"]
    used = {
        byte
        for unit in body["units"].values()
        if not unit.get("file")
        for byte in range(unit["offset"], unit["offset"] + unit["num_bytes"])
    }
    gaps = set(range(body["header_bytes"], body["file_bytes"])) - used
    flip(rank / body["file"], min(gaps))


def empty_region(rank: Path) -> None:
    change(rank / "region_0.json", lambda body: body.update(file_bytes=0, header_bytes=0, units={}))
    os.truncate(rank / "region_0.safetensors", 0)


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
ITERATION = '{"event":"iteration","iteration":1,"incarnation":0}\n'
LOSS_IN_WORDS = ITERATION[:-2] + ',"loss":"low","iteration_s":1,"num_tokens":1}\n'
GARBAGE = bytes((7 * byte) % 256 for byte in range(4000))

INSPECT = {
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

VERIFY = {
    "no argument": Case("", "error"),
    "data cut off": Case(
        "DIR", "wrong", persisted(lambda path: os.truncate(file_of(path, 1), 5000))
    ),
    "bit of the last unit": Case(
        "DIR", "wrong", persisted(lambda path: flip(file_of(path, 1), -20))
    ),
    "impossible header": Case("DIR", "wrong", persisted(lambda path: flip(file_of(path, 0), 7))),
    "data that is a directory": Case(
        "DIR", "wrong", persisted(lambda path: replace_by_directory(file_of(path, 1)))
    ),
    "missing index": Case(
        "DIR", "wrong", persisted(lambda path: file_of(path, 1, "json").unlink())
    ),
    "rank 0 twice": Case(
        "DIR", "wrong", manifest(lambda body: body.update(files=[body["files"][0]] * 2))
    ),
    "swapped ranks": Case("DIR", "wrong", manifest(swap_ranks)),
    "other iteration": Case("DIR", "wrong", manifest(lambda body: body.update(iteration=999))),
    "other lineage": Case(
        "DIR", "wrong", manifest(lambda body: body["identity"].update(lineage="other"))
    ),
    "other size": Case("DIR", "wrong", manifest(lambda body: body["files"][0].update(num_bytes=1))),
    "no units": Case("DIR", "wrong", manifest(lambda body: body.update(units={}))),
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
    "region of another rank": Case(
        "DIR",
        "wrong",
        in_memory(lambda rank: change(rank / "region_0.json", lambda body: body.update(rank=77))),
    ),
    "nothing complete": Case("DIR", "wrong", persisted(lambda path: manifest_of(path).unlink())),
    "data of another user": Case(
        "DIR", "wrong", persisted(lambda path: file_of(path, 1).chmod(0o600)), by_nobody=True
    ),
}

CLEAN = {
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

REPORT = {
    "no directory": Case("/nonexistent/x", "error"),
    "file": Case("DIR/x", "error", written("x", "x")),
    "no events": Case("DIR", "error"),
    "garbage": Case("DIR", "error", written(GARBAGE)),
    "no incarnation": Case("DIR", "error", written('{"event":"start","iteration":0}\n')),
    "loss in words": Case("DIR", "ok", written(START + LOSS_IN_WORDS)),
    "iterations without times": Case("DIR", "error", written(ITERATION * 2)),
    "empty log": Case("DIR", "error", written("")),
    "log of another user": Case("DIR", "error", written(START, mode=0o600), by_nobody=True),
    "directory of another user": Case("DIR", "error", then_closed(written(START)), by_nobody=True),
    "log that is a directory": Case("DIR", "error", made("rank_00000.jsonl")),
}

SIZES = "--model gpt-350m-16e --dp 16 --ep 8"
SPARSE = f"--strategy sparse {SIZES} --iteration-s 0.5 --bandwidth 2GB --network-bandwidth 2GB --mtbf-s 1800"
PARTIAL = f"--strategy partial {SIZES}"
BAD_PLANS = (
    *("--strategy foo", "--model nosuch", "--dp 0", "--dp -1", "--dp abc", "--ep 3", "--ep 64"),
    *("--iteration-s 0", "--iteration-s nan", "--iteration-s inf", "--bandwidth abc"),
    *("--bandwidth 0", "--mtbf-s 0", "--mtbf-s -5", "--mtbf-s nan", "--window 0"),
)
PLAN = {
    "nothing wrong": Case(SPARSE, "ok"),
    "no strategy": Case("", "error"),
    **{flag: Case(f"{SPARSE} {flag}", "error") for flag in BAD_PLANS},
    "window of too many snapshots": Case(f"{SPARSE} --window 1000", "ok"),
    "more experts than there are": Case(f"{PARTIAL} --k-snapshot 999", "error"),
    "no experts": Case(f"{PARTIAL} --k-snapshot 0", "error"),
}

CASES = {
    "no command": Case("", "error"),
    "unknown command": Case("frobnicate", "error"),
} | {
    f"{command}: {name}": Case(
        f"{command} {case.command}", case.answer, case.prepare, case.by_nobody
    )
    for command, cases in (
        ("inspect", INSPECT),
        ("verify", VERIFY),
        ("clean --remove", CLEAN),
        ("report", REPORT),
        ("plan", PLAN),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_input_is_answered_with_its_reason(
    case: Case,
    directory: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case.prepare(directory)
    monkeypatch.chdir(directory)
    before = set(directory.rglob("*"))
    words = tuple(word.replace("DIR", str(directory)).strip("'") for word in case.command.split())
    if case.by_nobody:
        nobody: ProcessPoolExecutor = request.getfixturevalue("nobody")
        answer = nobody.submit(run, words).result(DEADLINE_S)
    else:
        answer = run(words)
    says_why = re.search(r"^(python -m moe_ft.*: )?error: \S", answer.err, re.MULTILINE)
    is_error = answer.code == 2 and says_why is not None
    is_wrong = answer.code == 1 and re.search(r"^WRONG", answer.out, re.MULTILINE) is not None
    assert {
        "ok": answer.code == 0,
        "error": is_error,
        "wrong": is_wrong or is_error,
        "kept": (answer.code == 0 or is_error) and before <= set(directory.rglob("*")),
    }[case.answer], answer
