"""Memory that another user could have put there is not read, and a start is told why."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ft.engine.memory.regions import own_directory
from moe_ft.errors import UnsafePathError
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.readers import MemoryReader
from tests.unit.moe_ft.builders import fill_region

STRANGER = 65534


def link(path: Path) -> None:
    """Put a link in the place of something, to the same elsewhere."""
    target = path.parent.parent.parent / f"elsewhere_{path.name}"
    shutil.move(path, target)
    path.symlink_to(target)


def open_to_others(path: Path) -> None:
    path.chmod(0o777)


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, STRANGER, STRANGER)


@pytest.mark.parametrize("name", ["", "region_0.json", "region_0.safetensors"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (link, "is a symbolic link"),
        (open_to_others, "can be written by other users"),
        (give_away, f"belongs to user {STRANGER}"),
    ],
)
def test_state_that_is_not_safely_ours_is_not_used_and_said_to_be_there(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], reason: str
) -> None:
    region, _ = fill_region(own_directory(tmp_path / "node", 0))
    spoil(region.directory / name)
    found = look_at_memory(tmp_path / "node", "node-a", "job")
    assert found.versions == []
    (problem,) = found.problems
    assert reason in problem.text
    assert "memory of node node-a: rank_00000" in problem.text
    with pytest.raises(UnsafePathError, match=reason):
        MemoryReader(region.index_path)
