"""Reading of boundary logs: every kind of damage is found, nothing else is refused."""

import os
from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open

from moe_ft.engine.boundary.reading import LoggedIteration, decode_iteration, open_log, open_slot
from moe_ft.errors import CorruptStateError
from moe_ft.format.boundary import BoundaryIndex, Direction
from moe_ft.format.encoding import decode, encode
from tests.unit.moe_ft.builders import make_history
from tests.unit.moe_ft.engine.boundary.logs import NEXT, PREVIOUS, small_log


def test_file_of_a_log_is_a_valid_safetensors_file(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        sends = log.take(0)
    with safe_open(tmp_path / "boundary_0.safetensors", framework="pt") as opened:
        assert opened.get_tensor("forward/to_00002/1").equal(sends[1][2])
        assert opened.get_tensor("backward/to_00000/0").equal(sends[2][2])


def test_log_is_read_from_bytes_that_were_fetched(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
    index = (tmp_path / "boundary_0.json").read_bytes()
    content = memoryview((tmp_path / "boundary_0.safetensors").read_bytes())
    logged = decode_iteration(index, content, "fetched")
    logged.check()
    assert logged.num_sent(NEXT, Direction.FORWARD) == 2
    assert logged.find(NEXT, Direction.FORWARD, 1) == logged.index.sent[1]
    assert logged.find(NEXT, Direction.FORWARD, 2) is None
    assert logged.find(PREVIOUS, Direction.FORWARD, 0) is None


def test_truncated_or_empty_file_is_refused(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
        log.take(1)
    os.truncate(tmp_path / "boundary_0.safetensors", 5000)
    os.truncate(tmp_path / "boundary_1.safetensors", 0)
    found, problems = open_log(tmp_path)
    assert not found
    assert "has 5000 bytes, not" in problems[0]
    assert "boundary_1.safetensors: cannot mmap an empty file" in problems[1]


def test_header_of_another_iteration_is_refused(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
    path = tmp_path / "boundary_0.safetensors"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptStateError, match="its header does not match"):
        open_slot(tmp_path / "boundary_0.json")


def test_log_of_the_later_start_is_taken_where_two_have_an_iteration(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
        log.take(1)
    later = {}
    for number, start in ((0, 1), (1, 0)):
        path = tmp_path / f"boundary_{number}.json"
        index = decode(path.read_bytes(), BoundaryIndex, str(path))
        history = make_history([(start, 0)])
        identity = msgspec.structs.replace(index.identity, history=history)
        index = msgspec.structs.replace(index, iteration=5, identity=identity)
        path.write_bytes(encode(index))
        later[start] = index
    found, problems = open_log(tmp_path)
    assert not problems
    assert {iteration: each.index for iteration, each in found.items()} == {5: later[1]}


def test_directory_that_is_missing_holds_no_log(tmp_path: Path) -> None:
    assert open_log(tmp_path / "nothing") == ({}, [])


def test_content_of_another_size_is_refused(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
    index = open_slot(tmp_path / "boundary_0.json").index
    with pytest.raises(
        CorruptStateError, match=r"boundary_0.safetensors of rank 1, iteration 0 has 3"
    ):
        LoggedIteration(index, memoryview(b"abc"))
