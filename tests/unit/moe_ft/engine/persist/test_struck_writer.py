"""System calls of storage that fail or do a part, in each of their places: a checkpoint is whole, or none."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from tests.failing_calls import build_library, environment
from tests.unit.moe_ft.builders import fill_region

PROGRAM = "tests.unit.moe_ft.engine.persist.struck_writer"
PAST_CACHE = 60_000  # numbers of a tensor, so that a file has more than 1 MiB

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    folder = tmp_path_factory.mktemp("struck")
    large, _ = fill_region(folder / "large" / "rank", num_elements=PAST_CACHE)
    small, _ = fill_region(folder / "small" / "rank")
    with tempfile.TemporaryDirectory(prefix="moe_ft_test_", dir="/dev/shm") as memory:
        places = (large.data_path, folder / "disk", small.data_path, f"{memory}/storage")
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM, *map(str, places)],
            env={**os.environ, **environment(build_library(folder))},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_calls_that_do_a_part_or_are_interrupted_make_whole_checkpoints_and_regions(
    lines: Lines,
) -> None:
    found = [each for each in lines if each["error"] in (0, errno.EINTR)]
    assert {each["call"] for each in found} == {"write", "read", "fsync", "open", "fallocate"}
    assert all(each["num_calls"] > 0 for each in found)
    assert all(each["is_there"] and each["failure"] in ("", "None") for each in found), found


def test_call_that_fails_in_memory_costs_one_region_that_is_not_there_then(lines: Lines) -> None:
    """The program has compared what is there, and has made it again where it is not."""
    found = [each for each in lines if each["table"] == "regions" and not each["is_there"]]
    assert {each["call"] for each in found} >= {"fallocate", "write", "open", "rename", "mkdir"}


@pytest.mark.parametrize("call", ["write", "fsync", "close", "open", "rename", "mkdir", "unlink"])
def test_call_that_fails_costs_one_checkpoint_and_never_an_older_one(
    lines: Lines, call: str
) -> None:
    """The program has compared all bytes of what is there, and has written another one after each failure."""
    errors = (errno.EFAULT, errno.ENOSPC, errno.EDQUOT, errno.EIO)
    on_storage = [each for each in lines if each["table"] in ("parts", "errors")]
    found = [each for each in on_storage if each["call"] == call and each["error"] in errors]
    assert found
    assert all(each["num_others"] >= 1 for each in found if not each["is_there"]), found
    assert all(each["is_there"] or each["is_os_error"] for each in found), found
    if call != "unlink":  # what cannot be deleted costs room
        assert not all(each["is_there"] for each in found), "none of them cost anything?"


@pytest.mark.parametrize("table", ["errors", "locks"])
def test_file_that_is_stale_once_costs_nothing(lines: Lines, table: str) -> None:
    found = [each for each in lines if each["error"] == errno.ESTALE and each["table"] == table]
    assert len({each["call"] for each in found}) >= 5
    assert not [each for each in found if each["failure"]]
    assert all(each["is_there"] is (table == "errors") for each in found)
