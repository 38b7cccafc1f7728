"""Boundary logs are shown and checked, and are not taken for state."""

from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.recovery.inspect.boundary_logs import render_logs, verify_logs
from moe_ft.recovery.inspect.holdings import find_holdings
from moe_ft.recovery.inspect.verification import verify
from moe_ft.recovery.inventory import look_at_memory
from tests.unit.moe_ft.builders import fill_region
from tests.unit.moe_ft.commands.damaged import flip
from tests.unit.moe_ft.engine.boundary.logs import small_log


@pytest.fixture
def node_dir(tmp_path: Path) -> Path:
    """Return the memory of a node: a region, and the boundary log of two iterations."""
    fill_region(own_directory(tmp_path, 1), 0, rank=1)
    with small_log(own_directory(tmp_path, 1)) as log:
        log.take(4)
        log.take(5)
    return tmp_path


def test_logs_are_listed_by_rank(node_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(node_dir)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "4, 5" in line)
    assert line.split()[:4] == ["1", "4,", "5", "8"]


def test_log_that_cannot_be_read_is_listed_with_the_reason(node_dir: Path) -> None:
    (own_directory(node_dir, 1) / "boundary_0.json").write_bytes(b"{}")
    assert "is not a complete file of moe_ft" in render_logs(str(node_dir))
    assert "boundary log of rank" in render_logs(str(node_dir))


def test_directory_without_logs_gets_no_table(tmp_path: Path) -> None:
    assert render_logs(str(tmp_path)) == ""
    assert verify_logs("s3://bucket/none") == ([], [])


def test_intact_log_is_verified_besides_the_state(node_dir: Path) -> None:
    right, wrong = verify(str(node_dir))
    assert not wrong
    assert [line.partition(" (")[0] for line in right][1:] == [
        "boundary log of iteration 4, rank 1",
        "boundary log of iteration 5, rank 1",
    ]


def test_damaged_log_is_wrong_and_state_is_not(node_dir: Path) -> None:
    flip(own_directory(node_dir, 1) / "boundary_1.safetensors", -1)
    right, wrong = verify(str(node_dir))
    assert len(right) == 2
    (line,) = wrong
    assert "boundary_1.json" in line and "does not match its checksum" in line


def test_logs_are_no_state_for_a_recovery(node_dir: Path) -> None:
    flip(own_directory(node_dir, 1) / "boundary_1.safetensors", -1)
    (own_directory(node_dir, 1) / "boundary_0.json").write_bytes(b"{}")
    inventory = look_at_memory(node_dir, "node", "job")
    assert len(inventory.versions) == 1
    assert not inventory.problems
    assert len(find_holdings(str(node_dir))) == 1
