"""`inspect` answers bad input with its reason."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.unit.moe_ft.commands.bad_input import Case, cases_of, check_answer, then_closed, written
from tests.unit.moe_ft.commands.damaged import (
    in_memory,
    manifest,
    manifest_of,
    nest,
    persisted,
    seal,
)

GARBAGE = bytes((7 * byte) % 256 for byte in range(4000))
CASES = {
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


@cases_of("inspect", CASES)
def test_bad_input_is_answered_with_its_reason(
    case: Case, directory: Path, nobody: Callable[[], ProcessPoolExecutor]
) -> None:
    check_answer(case, directory, nobody)
