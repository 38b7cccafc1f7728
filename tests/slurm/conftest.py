"""Fixtures of the tests that submit jobs."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.references import Digests, References
from tests.slurm.cluster import Cluster, missing_programs
from tests.slurm.job import SlurmJob, reference


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag of `make test-slurm`."""
    parser.addoption("--needs-slurm", action="store_true", help="fail where it is not installed")


@pytest.fixture(scope="session")
def running_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Return a SLURM of three nodes; skip where it is not installed, or fail if that was asked for."""
    missing = missing_programs()
    if missing or os.geteuid() != 0:
        reason = f"needs root, and `apt-get install slurm-wlm munge` (missing: {missing or 'root'})"
        (pytest.fail if request.config.getoption("--needs-slurm", False) else pytest.skip)(reason)
    folder = Path(tempfile.mkdtemp(prefix="moe_ft_slurm_"))
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder)


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Return the cluster, whose jobs end with the test."""
    yield running_cluster
    running_cluster.end_jobs()


@pytest.fixture
def memory_dir(cluster: Cluster) -> Iterator[Path]:
    """Return a directory on tmpfs that the epilog cleans."""
    folder = Path(tempfile.mkdtemp(prefix=cluster.memory_prefix, dir="/"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def job(cluster: Cluster, dataset_flags: list[str], tmp_path: Path, memory_dir: Path) -> SlurmJob:
    """Return a job that has not been submitted yet."""
    return SlurmJob(cluster, dataset_flags, tmp_path / "run", memory_dir)


@pytest.fixture(scope="session")
def expected(shared_folder: Path, dataset_flags: list[str]) -> Digests:
    """Return the digests of the ranks when nothing disturbs them."""
    return reference(References(shared_folder / "references"), dataset_flags)
