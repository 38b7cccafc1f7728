"""Fixtures shared by all tests."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator

# Several ranks share the cores, and inherit this. Set it before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import filelock
import pytest
import torch

# Without a GPU, kernels run in Triton's interpreter. Megatron imports Triton, which reads this at import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from tests.flaky import register


def pytest_configure(config: pytest.Config) -> None:
    register(config)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of this test run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def dataset_flags(shared_folder: Path) -> list[str]:
    """Return the flags that train on a small byte-level dataset of real text."""
    folder = shared_folder / "dataset"
    with filelock.FileLock(shared_folder / "dataset.lock"):
        if not folder.exists():
            # Not the text of this project: each change of it would change all losses.
            source = TextSource(paths=(str(Path(asyncio.__file__).parent),))
            write_dataset(source, folder / "text")
    paths = ["--data-path", str(folder / "text"), "--data-cache-path", str(folder / "cache")]
    return [*paths, "--split", "80,10,10"]


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """Return a directory on tmpfs for the memory tier."""
    folder = Path(tempfile.mkdtemp(prefix="moe_ft_test_", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def mount_small(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts a file system of a size such as "6m", and returns its folder."""
    mounted: list[Path] = []

    def mount(size: str, folder: Path | None = None) -> Path:
        folder = folder or tmp_path / f"small_{len(mounted)}"
        folder.mkdir(mode=0o700, parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
            pytest.skip("mounting a small file system needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
