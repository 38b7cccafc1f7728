"""A further tier is its value, its row among the media, and one file with its writer, finder and reader.

Here that is a disk of the node, which outlives its memory.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ft.files.private_files import make_private, read_private, write_atomically
from moe_ft.planning.recovery import Version
from moe_ft.planning.tiers import MEMORY, STORAGE, Tier
from moe_ft.recovery import media
from moe_ft.recovery import start as phases
from moe_ft.recovery.inventory import Inventory, look_at_memory
from moe_ft.recovery.media import Medium
from moe_ft.recovery.readers import MemoryReader, StateReader
from moe_ft.recovery.site import Site
from tests.unit.moe_ft.builders import WINDOW_UNITS
from tests.unit.moe_ft.recovery.meetings import config_of, initialized, leave_window
from tests.unit.moe_ft.recovery.test_start import Rank

NVME = Tier("nvme", (MEMORY.preference + STORAGE.preference) // 2)


class Disk:
    """A disk of the node: writes what is complete in memory, and finds and reads it as it is there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, node_dir: Path) -> None:
        """Copy all that is complete in memory: data first, and then the index that makes it count."""
        for source in sorted(node_dir.glob("rank_*"))[:1]:
            make_private(self.directory)
            make_private(self.directory / source.name)
            for path in sorted(source.iterdir(), key=lambda each: each.suffix == ".json"):
                copy = self.directory / source.name / path.name
                write_atomically(copy, bytes(read_private(path)))

    def find(self, site: Site) -> Inventory:
        """Return the state on the disk."""
        if not self.directory.is_dir():
            return Inventory()
        found = look_at_memory(self.directory, site.node, site.job_id)
        found.versions = [replace(each, tier=NVME) for each in found.versions]
        return found

    def open(self, met: Any, claimed: Any, version: Version) -> StateReader:
        """Return the reader of a version."""
        return MemoryReader(self.directory / version.path)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    monkeypatch.setattr(phases, "meet", rank.meet)
    with initialized():
        yield rank


@pytest.mark.parametrize("length", [1, 3])
def test_state_that_is_left_in_a_further_tier_alone_is_recovered_bit_for_bit(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    config, disk = config_of(rank.folder), Disk(rank.folder / "disk")
    leave_window(config, length=length)
    disk.write(rank.node_dir)
    rank.start(config).close()  # from memory
    expected = [each.clone() for each in rank.masters()]
    shutil.rmtree(rank.folder / "memory")
    monkeypatch.setattr(
        media,
        "MEDIA",
        [*media.MEDIA, Medium(find_on_node=disk.find, readers={NVME: disk.open})],
    )
    running = rank.start(config)
    outcome = running.outcome
    running.close()
    assert outcome.iteration == 4 + length
    assert outcome.sources == {NVME: len(WINDOW_UNITS)}
    assert set(outcome.read_bytes) == {"node"}
    assert any(each.count_nonzero() for each in expected)
    for one, other in zip(rank.masters(), expected, strict=True):
        assert torch.equal(one, other)
