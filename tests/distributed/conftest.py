"""Fixtures of the tests that run jobs with checkpoints."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoint_job import CheckpointJob
from tests.demo_model import event_flags
from tests.harness import digests, run_training

Digests = list[tuple[str, str]]
Reference = Callable[[list[str], int], Digests]


@pytest.fixture
def job(dataset_flags: list[str], tmp_path: Path, memory_dir: Path) -> CheckpointJob:
    """Return a job that takes checkpoints."""
    return CheckpointJob(dataset_flags, tmp_path, memory_dir)


@pytest.fixture(scope="session")
def expected(dataset_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Return the digests of the job's ranks when it takes no checkpoints and nothing fails."""
    folder = tmp_path_factory.mktemp("reference_job")
    return CheckpointJob(dataset_flags, folder, folder).reference()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a function that trains without checkpoints and faults; equal flags share one run."""
    known: dict[tuple[str, ...], Digests] = {}

    def train(flags: list[str], world_size: int) -> Digests:
        """Return every rank's digest."""
        if (key := (str(world_size), *flags)) not in known:
            folder = tmp_path_factory.mktemp("reference")
            run_training([*flags, *event_flags(folder)], world_size, log_dir=folder).check()
            known[key] = digests(folder, world_size)
        return known[key]

    return train


@pytest.fixture
def mount_small(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a file system of a size such as "6m" and returns its folder."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"small_{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
