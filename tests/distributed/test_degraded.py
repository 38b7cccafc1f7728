"""Whatever happens to storage, memory, peers or the writer: training goes on, and says what is missing."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.checkpoint_job import NUM_RANKS, TWO_NODES, CheckpointJob

DEADLINE_S = 60.0


def reasons(job: CheckpointJob, part: str) -> str:
    lines = [line for rank in range(NUM_RANKS) for line in job.events("degraded", rank)]
    return "; ".join(line["reason"] for line in lines if line["part"] == part)


def act_when(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Do something, on another thread, as soon as a condition holds."""

    def wait() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def writers(job: CheckpointJob) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if "moe_ft.engine.persist_worker" in words and str(job.storage) in words:
                found.append(process)
    return found


def test_full_disk_leaves_the_last_good_checkpoint_and_training_goes_on(
    job: CheckpointJob,
    expected: list[tuple[str, str]],
    mount_small: Callable[[str], Path],
) -> None:
    job.storage = mount_small("6m") / "storage"
    job.run("--moe-ft-keep", "9", storage=True).check()
    assert "No space left on device" in reasons(job, "persist")
    assert job.digests() == expected
    manifests = sorted(job.storage.glob("iter_*/manifest.json"))
    assert manifests
    job.run("--exit-interval", "1", storage=True).check()
    restored = job.events("recovery")[0]["restored_iteration"]
    assert f"iter_{restored:07d}" in {path.parent.name for path in manifests}


def test_storage_that_vanishes_is_reported_and_training_goes_on(
    job: CheckpointJob,
    expected: list[tuple[str, str]],
) -> None:
    def vanish() -> None:
        shutil.rmtree(job.storage)
        job.storage.write_text("a file is in its place")

    watcher = act_when(lambda: any(job.storage.glob("iter_*/manifest.json")), vanish)
    job.run(storage=True).check()
    watcher.join()
    assert reasons(job, "persist")
    assert job.digests() == expected


def test_memory_that_vanishes_is_reported_and_training_goes_on(
    job: CheckpointJob,
    expected: list[tuple[str, str]],
) -> None:
    own = job.memory_dir / "test"
    watcher = act_when(
        lambda: len(list(own.rglob("region_*.json"))) == 2 * NUM_RANKS, lambda: shutil.rmtree(own)
    )
    job.run().check()
    watcher.join()
    assert "No such file or directory" in reasons(job, "snapshot")
    assert job.digests() == expected


def test_killed_writer_is_started_again(
    job: CheckpointJob,
    expected: list[tuple[str, str]],
) -> None:
    watcher = act_when(lambda: bool(writers(job)), lambda: writers(job)[0].kill())
    job.run(storage=True).check()
    watcher.join()
    assert "ended with code -9; it is started again" in reasons(job, "writer")
    assert job.events("persist")[-1]["iteration"] == 6
    assert job.digests() == expected


def test_stopped_writer_is_killed_and_replaced(
    job: CheckpointJob,
    expected: list[tuple[str, str]],
) -> None:
    def stop() -> None:
        os.kill(writers(job)[0].pid, signal.SIGSTOP)

    watcher = act_when(lambda: bool(writers(job)), stop)
    job.run(storage=True).check()
    watcher.join()
    assert "gave no sign of life" in reasons(job, "writer")
    assert job.events("persist")[-1]["iteration"] == 6
    assert job.digests() == expected


def test_writer_ends_with_a_killed_rank(job: CheckpointJob) -> None:
    job.run("--moe-ft-inject-fault", "kill:0@4:backward", storage=True)
    deadline = time.monotonic() + DEADLINE_S
    while writers(job):
        assert time.monotonic() < deadline, "a writer outlives its rank"
        time.sleep(0.05)


def test_failing_snapshot_thread_costs_one_snapshot(
    job: CheckpointJob,
    expected: list[tuple[str, str]],
) -> None:
    job.run("--moe-ft-inject-fault", "exception:1@3:snapshot").check()
    assert "InjectedFaultError" in reasons(job, "snapshot")
    assert "another rank has none" in reasons(job, "snapshot")
    taken = [line["iteration"] for line in job.events("snapshot", 1)]
    assert 3 not in taken
    assert taken[-1] > 3
    assert job.digests() == expected


def test_replica_that_fails_once_is_made_up_for_by_the_next(
    job: CheckpointJob,
    expected: list[tuple[str, str]],
) -> None:
    faults = ("exception:1@2:replicate", "lose-node:1@5:backward")
    job.run_with_faults(*faults, nodes=lambda start: TWO_NODES)
    assert "rank 0 did not take the replica" in reasons(job, "replicate")
    replicated = [line["iteration"] for line in job.events("replicate", 1)]
    assert 2 not in replicated
    (recovery,) = job.events("recovery", 1)
    assert set(recovery["sources"]) == {"peer"}
    assert recovery["restored_iteration"] > 2
    assert job.digests() == expected


def test_hanging_copy_thread_skips_snapshots_and_training_goes_on(
    job: CheckpointJob,
    expected: list[tuple[str, str]],
) -> None:
    job.run("--moe-ft-inject-fault", "hang:1@3:replicate", nodes=TWO_NODES).check()
    skipped = [line["reason"] for line in job.events("skipped")]
    assert "the last one is not complete" in skipped
    assert job.digests() == expected


def test_degraded_part_ends_training_if_the_user_says_so(job: CheckpointJob) -> None:
    result = job.run(
        "--moe-ft-on-error", "raise", "--moe-ft-inject-fault", "exception:1@3:snapshot"
    )
    assert any(result.exit_codes)
    outputs = result.output(0) + result.output(1)
    assert "DegradedError" in outputs
    assert "(--moe-ft-on-error=raise)" in outputs
