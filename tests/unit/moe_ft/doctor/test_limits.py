"""Limits are those of a real process, which sets them before it looks."""

import multiprocessing
import resource
from pathlib import Path
from typing import Any

import pytest

from moe_ft.doctor import machine
from moe_ft.doctor.machine import check_limits
from moe_ft.doctor.rows import Result, Row


def _limited(queue: Any, which: int, value: int, pattern: str, path: Path) -> None:
    hard = resource.getrlimit(which)[1] if which != resource.RLIMIT_NOFILE else value
    resource.setrlimit(which, (value, hard))
    path.write_text(pattern)
    machine.CORE_PATTERN = path
    queue.put(check_limits("n0", 64, 32))


@pytest.mark.parametrize(
    ("which", "value", "pattern", "check", "result"),
    [
        (resource.RLIMIT_MEMLOCK, 65536, "core", "locked memory", Result.WARN),
        (resource.RLIMIT_NOFILE, 200, "core", "open files", Result.FAIL),
        (resource.RLIMIT_NOFILE, 2000, "core", "open files", Result.PASS),
        (resource.RLIMIT_CORE, 0, "core", "core files", Result.PASS),
        (resource.RLIMIT_CORE, 1 << 20, "core.%p", "core files", Result.WARN),
        (resource.RLIMIT_CORE, 1 << 20, "|/bin/collect %p", "core files", Result.PASS),
    ],
)
def test_limit_of_a_process(
    which: int, value: int, pattern: str, check: str, result: Result, tmp_path: Path
) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY and hard < value:
        pytest.skip("the hard limit of this machine is lower")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(
        target=_limited, args=(queue, which, value, pattern, tmp_path / "pattern")
    )
    process.start()
    rows: list[Row] = queue.get()
    process.join()
    assert {row.check: row.result for row in rows}[check] is result
