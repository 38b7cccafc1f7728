"""Damage to any file of any tier is noticed, and the next tier or an older state is used instead."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs import TWO_NODES, CheckpointJob, flip_byte
from tests.shares import share_of

KILL = "kill:1@4:backward"
Damage = Callable[[Path], None]


def flip_data(index: Path) -> None:
    flip_byte(index.with_suffix(".safetensors"), -100)


def truncate_data(index: Path) -> None:
    data = index.with_suffix(".safetensors")
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)


def flip_index(index: Path) -> None:
    flip_byte(index, index.stat().st_size // 2)


def truncate_index(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:100])


def remove_index(index: Path) -> None:
    index.unlink()


DAMAGES = (flip_data, truncate_data, flip_index, truncate_index, remove_index)


@pytest.mark.parametrize("damage", share_of(DAMAGES, flip_data))
def test_damaged_own_memory_is_replaced_by_the_peers_copy(
    damage: Damage,
    job: CheckpointJob,
    expected: list[tuple[str, str]],
) -> None:
    def between(start: int) -> None:
        for index in (job.memory_dir / "test" / "node1" / "rank_00001").glob("region_*.json"):
            damage(index)

    job.run_with_faults(KILL, nodes=lambda start: TWO_NODES, between=between, is_intact=False)
    ((restored, _),) = job.recovered()
    assert restored in range(1, 5)
    assert set(job.events("recovery", 0)[0]["sources"]) == {"memory"}
    (recovery,) = job.events("recovery", 1)
    assert "peer" in recovery["sources"]
    assert job.digests() == expected
    if damage is not remove_index:
        assert any("region_" in problem for problem in recovery["problems"])


@pytest.mark.rest
@pytest.mark.parametrize("position", (5, 300, -3))
def test_damaged_manifest_makes_its_directory_no_checkpoint(
    position: int,
    job: CheckpointJob,
) -> None:
    job.run("--exit-interval", "4", "--moe-ft-keep", "3", storage=True).check()
    before = job.stored()[-2]
    flip_byte(job.storage / "iter_0000004" / "manifest.json", position)
    job.run("--exit-interval", "5", storage=True).check()
    assert job.recovered() == [(before, before)]
