"""Flags and directories that cannot work are refused with the reason and the remedy."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.storage import Lock, Storage
from tests.checkpoint_job import CheckpointJob
from tests.demo_model import layout_flags

REFUSED = 2


def refusal(job: CheckpointJob, *flags: str, storage: bool = False) -> str:
    result = job.run(*flags, storage=storage)
    assert result.exit_codes[0] == REFUSED, result.output(0)[-2000:]
    (line,) = [
        line
        for line in result.output(0).splitlines()
        if line.startswith("pretrain_gpt_moe.py: error:")
    ]
    return line


def test_persist_directory_that_cannot_be_written_is_refused(job: CheckpointJob) -> None:
    job.storage.write_text("a file")
    line = refusal(job, storage=True)
    assert f"--moe-ft-persist-dir={job.storage} cannot be used" in line


def test_unknown_storage_protocol_is_refused(job: CheckpointJob) -> None:
    line = refusal(job, "--moe-ft-persist-dir", "nosuch://bucket/path")
    assert "--moe-ft-persist-dir=nosuch://bucket/path cannot be used" in line


def test_persist_directory_of_another_running_job_is_refused(job: CheckpointJob) -> None:
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.2):
            Storage(str(job.storage)).write_lock("other", "", "elsewhere")

    other = threading.Thread(target=renew)
    other.start()
    try:
        line = refusal(job, storage=True)
    finally:
        ended.set()
        other.join()
    assert "is used by job 'other' on" in line
    assert "Name another one" in line


def test_stale_lock_of_another_job_is_taken_over(job: CheckpointJob) -> None:
    job.storage.mkdir()
    lock = Lock(job_id="other", lineage="", host="elsewhere", heartbeat_s=time.time() - 3600)
    (job.storage / "moe_ft.lock").write_bytes(msgspec.json.encode(lock))
    result = job.run("--exit-interval", "2", storage=True).check()
    assert "taking over" in result.output(0)


def test_regions_that_do_not_fit_the_file_system_are_refused(
    job: CheckpointJob,
    mount_small: Callable[[str], Path],
) -> None:
    tiny_memory = mount_small("1m")
    line = refusal(job, "--moe-ft-memory-dir", str(tiny_memory))
    assert f"--moe-ft-memory-dir={tiny_memory}: snapshots and replicas take" in line
    assert "Enlarge it" in line


def test_regions_above_the_memory_limit_are_refused(job: CheckpointJob) -> None:
    line = refusal(job, "--moe-ft-host-memory-limit", "100kB")
    assert "--moe-ft-host-memory-limit=100kB: snapshots and replicas take" in line


def test_more_replicas_than_other_nodes_are_refused(job: CheckpointJob) -> None:
    line = refusal(job, "--moe-ft-replication-factor", "1")
    assert "--moe-ft-replication-factor=1: 1 replicas need 2 nodes, there are 1" in line


def test_missing_job_name_is_refused(job: CheckpointJob) -> None:
    flags = job.flags()
    position = flags.index("--moe-ft-job-id")
    del flags[position : position + 2]
    job.flags = lambda *more, storage=False: [*flags, *more]  # type: ignore[method-assign]
    assert "--moe-ft-job-id is missing" in refusal(job)


def test_memory_directory_that_is_not_on_tmpfs_is_warned_about(
    job: CheckpointJob,
    tmp_path: Path,
) -> None:
    flags = ("--moe-ft-memory-dir", str(tmp_path / "memory"), "--exit-interval", "1")
    result = job.run(*flags).check()
    assert "not on tmpfs: snapshots go at the speed of that" in result.output(0)


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["--moe-ffn-hidden-size", "128"], "--moe-ffn-hidden-size: 64 there, 128 now"),
        (
            layout_flags({"pp": 2, "ep": 1}),
            "--expert-model-parallel-size: 2 there, 1 now; --pipeline-model-parallel-size: 1 there",
        ),
        (["--seed", "5"], "--seed: 1234 there, 5 now"),
        (["--overlap-grad-reduce", "--ddp-num-buckets", "4"], "cuts of the state"),
    ],
)
def test_state_of_another_model_or_layout_is_refused(
    flags: list[str],
    difference: str,
    job: CheckpointJob,
) -> None:
    job.run("--exit-interval", "2", storage=True).check()
    line = refusal(job, *flags, storage=True)
    assert difference in line
    assert "name another --moe-ft-persist-dir" in line


def test_second_job_of_the_same_name_is_refused(job: CheckpointJob) -> None:
    import filelock

    node = "thisnode"
    directory = job.memory_dir / "test" / node
    directory.mkdir(parents=True)
    with filelock.FileLock(directory / "rank_00001.alive"):
        line = refusal(job, "--moe-ft-node-id", node)
    assert "rank 1 of a job of this name is running on node thisnode already" in line


def test_memory_directories_are_private(job: CheckpointJob) -> None:
    job.run("--moe-ft-inject-fault", "kill:0@2:backward")
    directories = [path for path in job.memory_dir.rglob("*") if path.is_dir()]
    assert directories
    assert {path.stat().st_mode & 0o777 for path in directories} == {0o700}
    files = [path for path in job.memory_dir.rglob("region_*") if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in files} == {0}
