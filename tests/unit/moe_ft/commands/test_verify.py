"""`verify` finds damage and answers bad input with its reason."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.unit.moe_ft.commands.bad_input import Case, cases_of, check_answer
from tests.unit.moe_ft.commands.damaged import (
    change,
    empty_region,
    file_of,
    flip,
    in_memory,
    manifest,
    manifest_of,
    persisted,
    pool_of,
    replace_by_directory,
    swap_ranks,
    touch_gap,
)

CASES = {
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


@cases_of("verify", CASES)
def test_bad_input_is_answered_with_its_reason(
    case: Case, directory: Path, nobody: Callable[[], ProcessPoolExecutor]
) -> None:
    check_answer(case, directory, nobody)
