"""A node's checks: storage that cannot be used is one row among others, and nothing stays."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_ft.config.config import MemoryConfig, MoeFtConfig
from moe_ft.config.storage import StorageConfig
from moe_ft.doctor.job import Job
from moe_ft.doctor.meeting import Meeting
from moe_ft.doctor.network import Peer
from moe_ft.doctor.node_checks import NodeChecks, Roster, Times
from moe_ft.doctor.place import Place
from moe_ft.doctor.rows import Result, Row
from tests.unit.moe_ft.peer import TOKEN


def check(address: tuple[str, int], memory_dir: Path, persist_dir: str | None) -> list[Row]:
    """Return the rows of a lone node."""
    config = MoeFtConfig(
        memory=MemoryConfig(memory_dir=str(memory_dir), job_id="a"),
        storage=StorageConfig(persist_dir=persist_dir),
    )
    roster = Roster(nodes={"n0": Peer(node="n0", address=address)}, peers={"n0": []})
    with ExitStack() as opened:
        return NodeChecks(
            job=Job(config=config),
            node="n0",
            num_local=1,
            token=TOKEN,
            roster=roster,
            meeting=Meeting(Place(), 0.0),
            times=Times(begin_s=time.monotonic(), total_s=100.0),
            transfer_bytes=1 << 20,
            opened=opened,
        ).run()


def test_every_part_of_a_node_is_checked(
    address: tuple[str, int], memory_dir: Path, tmp_path: Path
) -> None:
    rows = check(address, memory_dir, str(tmp_path / "persist"))
    assert [row.check for row in rows] == [
        *("memory dir", "memory room", "huge pages", "leftovers"),
        *("locked memory", "open files", "core files"),
        *("reach", "storage", "storage lock", "storage room", "storage write", "storage read"),
    ]
    assert {row.result for row in rows if "storage" in row.check} <= {Result.PASS, Result.WARN}
    assert list(tmp_path.iterdir()) == list(memory_dir.iterdir()) == []


@pytest.mark.parametrize("url", ["DIR/file/persist", "nosuch://x"])
def test_storage_that_cannot_be_used_fails_and_the_rest_is_checked(
    url: str, address: tuple[str, int], memory_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    rows = check(address, memory_dir, url.replace("DIR", str(tmp_path)))
    assert [row.check for row in rows if row.result is Result.FAIL] == ["storage"]
    assert "reach" in [row.check for row in rows]


def test_node_without_storage_has_no_rows_of_it(address: tuple[str, int], memory_dir: Path) -> None:
    assert not [row for row in check(address, memory_dir, None) if "storage" in row.check]
