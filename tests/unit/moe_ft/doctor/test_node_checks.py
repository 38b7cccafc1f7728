"""A node's checks: storage that cannot be used is one row among others, and nothing stays."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from moe_ft.config.config import MemoryConfig, MoeFtConfig, StorageConfig
from moe_ft.doctor.examination import Answering, Examination, NodeChecks
from moe_ft.doctor.job import ExaminedJob
from moe_ft.doctor.meeting import Meeting, MeetingPlace
from moe_ft.doctor.network import Peer
from moe_ft.doctor.rows import CheckRow, Result
from tests.unit.moe_ft.peer import TOKEN


def check(address: tuple[str, int], memory_dir: Path, persist_dir: str | None) -> list[CheckRow]:
    """Return the rows of a lone node."""
    config = MoeFtConfig(
        memory=MemoryConfig(memory_dir=str(memory_dir), job_id="a"),
        storage=StorageConfig(persist_dir=persist_dir),
    )
    answering = Answering(nodes={"n0": Peer(node="n0", address=address)}, peers={"n0": []})
    examination = Examination(
        job=ExaminedJob(config=config),
        place=MeetingPlace(),
        timeout_s=100.0,
        transfer_bytes=1 << 20,
        token=TOKEN,
    )
    examination.meeting = Meeting(MeetingPlace(), 0.0)
    with ExitStack() as examination.opened:
        return NodeChecks(examination, answering, "n0", 1).run()


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
