"""Training continues without storage, memory, peers or the writer, and reports what is missing."""

import email
import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

import pretrain_gpt_moe
from megatron.fault_tolerance.launch import pretraining
from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from megatron.fault_tolerance.seams.contents import content_of
from moe_ft.cli import main
from moe_ft.engine import ending
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.engine import CheckpointEngine
from moe_ft.engine.persist import writer
from moe_ft.engine.persist.storage_lock import LOCK_NAME
from moe_ft.loop.refusing import EXIT_NOT_SAVED
from moe_ft.recovery.checkpointing import Checkpointing
from moe_ft.state.record import CapturedRecord, IterationFacts
from tests.failing_calls import Rule, build_library, environment
from tests.jobs import NUM_RANKS, TWO_NODES, CheckpointJob, refusal
from tests.references import Digests
from tests.waiting import wait_for

DEADLINE_S = 240.0
BROKEN_AT = 4


def reasons(job: CheckpointJob, part: str) -> str:
    lines = [line for rank in range(NUM_RANKS) for line in job.events("degraded", rank)]
    return "; ".join(line["reason"] for line in lines if line["part"] == part)


def act_when(condition: Callable[[], bool], action: Callable[[], None]) -> threading.Thread:
    """Act on another thread as soon as a condition holds."""

    def wait() -> None:
        wait_for(condition, "something to act on", DEADLINE_S)
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def writers(job: CheckpointJob) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if writer.__name__ in words and str(job.memory_dir) in words:
                found.append(process)
    return found


def train_with_short_pauses(flags: list[str]) -> None:
    """Train, with short pauses between the attempts to write the last state. Runs on every rank."""
    ending._PAUSES_S = (0.1, 0.1)  # type: ignore[assignment]
    pretraining.END_GRACE_S = 0.5
    pretrain_gpt_moe.main(flags)


def train_under(library: Path, rule: Rule, flags: list[str]) -> None:
    """Train; a rule is for the processes that the ranks start. Runs on every rank."""
    os.environ.update(environment(library, rule))
    train_with_short_pauses(flags)


def test_full_disk_with_short_writes_leaves_the_last_good_checkpoint_and_training_goes_on(
    job: CheckpointJob,
    expected: Digests,
    mount_small: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    job.storage = mount_small("6m") / "storage"
    rule = Rule(place=str(job.storage), call="write", most=4096, every=1)
    job.train = partial(train_under, build_library(tmp_path), rule)
    job.run("--moe-ft-keep", "9", storage=True)
    assert "No space left on device" in reasons(job, "persist")
    assert job.digests() == expected
    manifests = sorted(job.storage.glob("iter_*/manifest.json"))
    assert manifests
    shutil.rmtree(job.memory_dir / "test")
    job.run("--exit-interval", "1", storage=True)
    ((restored, _),) = job.recovered()
    assert f"iter_{restored:07d}" in {path.parent.name for path in manifests}


@pytest.mark.rest
def test_wrong_bytes_under_a_manifest_make_no_checkpoint_and_a_restart_takes_the_one_before(
    job: CheckpointJob, expected: Digests, tmp_path: Path
) -> None:
    rule = Rule(
        place=f"{job.storage}/iter_0000004/rank_00000*safetensors", call="write", most=-1, every=1
    )
    job.train = partial(train_under, build_library(tmp_path), rule)
    result = job.run("--exit-interval", "4", storage=True)
    assert EXIT_NOT_SAVED in result.exit_codes, result.output(0)[-2000:]
    assert {each["iteration"] for each in job.events("persist")} == {2, 4}, "nothing was complete"
    assert {each["iteration"] for each in job.events("read_back")} == {2}
    assert "iteration 4 is not on storage as it was written: it is no checkpoint" in reasons(
        job, "persist"
    )
    assert not list(job.storage.glob("iter_0000004/rank_00000*"))
    assert job.stored() == [2, 4], "its manifest is there, and is that of no checkpoint"
    job.train = None
    shutil.rmtree(job.memory_dir / "test")
    job.run(storage=True).check()
    assert job.recovered() == [(2, 2)]
    assert {*job.events("recovery")[0]["sources"]} == {"storage"}
    assert job.digests() == expected


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_start_on_a_full_disk_continues_from_memory_and_says_so(
    job: CheckpointJob,
    expected: Digests,
    mount_small: Callable[[str], Path],
) -> None:
    disk = mount_small("40m")
    job.storage, job.train = disk / "storage", train_with_short_pauses
    job.run("--moe-ft-inject-fault", "kill:1@5:backward", storage=True)
    stored = job.stored()
    with suppress(OSError), (disk / "others").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    result = job.run(storage=True)
    assert EXIT_NOT_SAVED in result.exit_codes, result.output(0)[-2000:]
    ((restored, _),) = job.recovered()
    assert restored > max(stored, default=0)
    assert {*job.events("recovery")[0]["sources"]} == {"memory"}
    assert f"--moe-ft-persist-dir={job.storage} cannot be used" in reasons(job, "persist")
    assert "No space left on device" in reasons(job, "persist")
    assert job.digests() == expected
    assert job.stored() == stored
    left = {path.name for path in job.storage.iterdir() if not path.name.startswith("iter_")}
    assert left <= {LOCK_NAME}, "a start that failed to write has left something"
    assert (job.memory_dir / "test").exists()


@pytest.mark.rest
def test_memory_that_vanishes_is_reported_and_training_goes_on(
    job: CheckpointJob,
    expected: Digests,
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
    expected: Digests,
) -> None:
    watcher = act_when(lambda: bool(writers(job)), lambda: writers(job)[0].kill())
    job.run(storage=True).check()
    watcher.join()
    assert "ended with code -9; it is started again" in reasons(job, "writer")
    assert job.events("persist")[-1]["iteration"] == 6
    assert job.digests() == expected


def test_writer_ends_with_a_killed_rank(job: CheckpointJob) -> None:
    seen: list[psutil.Process] = []
    watcher = act_when(lambda: bool(writers(job)), lambda: seen.extend(writers(job)))
    job.run("--moe-ft-inject-fault", "kill:0@4:backward", storage=True)
    watcher.join()
    assert seen
    wait_for(lambda: not writers(job), "the end of the writer", DEADLINE_S)


@pytest.mark.rest
def test_hanging_copy_thread_skips_snapshots_and_training_goes_on(
    job: CheckpointJob,
    expected: Digests,
) -> None:
    job.run("--moe-ft-inject-fault", "hang:1@3:replicate", nodes=TWO_NODES).check()
    skipped = [line["reason"] for line in job.events("skipped")]
    assert "the last one is not complete" in skipped
    assert job.digests() == expected


def planned_node_bytes(job: CheckpointJob, capsys: pytest.CaptureFixture[str]) -> int:
    """Return the memory of a node that `plan` prints for the job."""
    capsys.readouterr()
    assert main(["plan", "--world-size", str(NUM_RANKS), "--", *job.flags()]) == 0
    (size,) = re.findall(r"a node of 2, at most, MB +([\d.,]+)", capsys.readouterr().out)
    return round(float(size.replace(",", "")) * 1e6)


def test_memory_directory_of_the_size_that_plan_prints_is_enough(
    job: CheckpointJob,
    expected: Digests,
    mount_small: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    job.memory_dir = mount_small(str(planned_node_bytes(job, capsys)))
    job.run("--exit-interval", "3").check()  # its memory stays
    assert {path.suffix for path in job.memory_dir.rglob("region_*")} == {".json", ".safetensors"}
    job.resume()
    assert job.digests() == expected
    assert all(job.events("degraded", rank) == [] for rank in range(NUM_RANKS))
    assert all(len(job.events("snapshot", rank)) > 4 for rank in range(NUM_RANKS))


def train_beside_a_hog(flags: list[str]) -> None:
    """Train, while something else fills the memory directory to its last byte. Runs on every rank."""
    protect = CheckpointEngine.protect

    def fill(engine: CheckpointEngine) -> None:
        protect(engine)  # all ranks have their regions
        if os.environ["RANK"] == "0":
            memory_dir = Path(flags[flags.index("--moe-ft-memory-dir") + 1])
            with suppress(OSError), (memory_dir / "hog").open("wb", buffering=0) as hog:
                while True:
                    hog.write(bytes(4096))

    CheckpointEngine.protect = fill  # type: ignore[method-assign, assignment]
    pretrain_gpt_moe.main(flags)


def test_run_that_nothing_protects_says_so_each_time_and_at_its_end(
    job: CheckpointJob, expected: Digests, mount_small: Callable[[str], Path]
) -> None:
    job.memory_dir, job.train = mount_small("16m"), train_beside_a_hog
    result = job.run().check()
    assert job.digests() == expected
    said = result.output(0) + result.output(1)
    left = rf"{job.memory_dir}/\S+ has 0 B of 16.00 MiB left: enlarge its file system"
    for number in range(1, job.num_iterations):
        assert re.search(f"nothing protects this run: {number} of {number} .*failed. {left}", said)
    assert re.search(f"an index of .* KiB does not fit. {left}", said)
    last = [line for line in result.output(0).splitlines() if " moe_ft: " in line][-1]
    assert re.search(f"nothing has protected this run: all .* snapshots have failed.* {left}", last)


@pytest.mark.rest
def test_run_that_nothing_protects_ends_if_the_user_says_so(
    job: CheckpointJob, mount_small: Callable[[str], Path]
) -> None:
    job.memory_dir, job.train = mount_small("16m"), train_beside_a_hog
    result = job.run("--moe-ft-on-error", "raise")
    assert any(result.exit_codes)
    outputs = result.output(0) + result.output(1)
    assert re.search(r"DegradedError: .* does not fit.*\(--moe-ft-on-error=raise\)", outputs)


@pytest.mark.rest
def test_last_state_that_storage_has_no_room_for_stays_in_memory_until_the_next_start_writes_it(
    job: CheckpointJob,
    expected: Digests,
    mount_small: Callable[[str], Path],
) -> None:
    roomy, job.storage = job.storage, mount_small("200k") / "storage"
    job.train = train_with_short_pauses
    result = job.run("--exit-interval", "4", storage=True)
    assert EXIT_NOT_SAVED in result.exit_codes
    assert all(result.exit_codes)
    assert job.stored() == []
    output = result.output(0) + result.output(1)
    assert output.count("iteration 4: persist: OSError: [Errno 28]") >= 3
    assert "the last state (iteration 4) is not on storage" in output
    assert "The memory of the nodes still holds it" in output
    job.storage = roomy
    job.resume(storage=True)
    assert job.recovered() == [(4, 4)]
    assert set(job.events("recovery")[0]["sources"]) == {"memory"}
    assert job.stored()[-1] == 6
    assert job.digests() == expected


def train_with_broken_agreement(flags: list[str]) -> None:
    """Train; one rank votes in one iteration and never reads the result. Runs on every rank."""
    original, num_heard = Agreement.result, 0

    def result(agreement: Agreement) -> list[int]:
        nonlocal num_heard
        num_heard += 1
        if os.environ["RANK"] == "1" and num_heard == BROKEN_AT:
            raise RuntimeError("Connection closed by peer")
        return original(agreement)

    Agreement.result = result  # type: ignore[method-assign,assignment]  # this process only
    pretraining.END_GRACE_S = 0.5
    pretrain_gpt_moe.main(flags)


def test_ranks_that_cannot_agree_any_more_recover_at_the_next_start_on_equal_data_alone(
    job: CheckpointJob, expected: Digests
) -> None:
    job.train = train_with_broken_agreement
    result = job.run(storage=True)
    assert EXIT_NOT_SAVED in result.exit_codes
    assert all(result.exit_codes)
    assert job.digests() == expected
    for rank in range(NUM_RANKS):
        told = [line for line in job.events("degraded", rank) if line["part"] == "agreement"]
        assert "checkpointing is off until the next start" in told[0]["reason"]
        assert "RuntimeError" in told[0]["traceback"]
    job.train, word = None, job.base.index("--data-path") + 1
    own, elsewhere = Path(job.base[word]), job.folder / "elsewhere" / "text"
    job.base[word] = str(elsewhere)
    write_dataset(TextSource(paths=(str(Path(email.__file__).parent),)), elsewhere)
    line = refusal(job.run(storage=True))
    there, now = content_of(str(own)), content_of(str(elsewhere))
    assert f"--data-path text: {there} there, text: {now} now" in line
    job.base[word] = str(elsewhere.with_name("copy"))
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{own}{suffix}", f"{job.base[word]}{suffix}")
    job.resume(storage=True)
    ((restored, _),) = job.recovered()
    assert BROKEN_AT - 2 <= restored <= BROKEN_AT
    assert job.stored()[-1] == 6
    assert job.digests() == expected


def train_with_failing_capture(flags: list[str]) -> None:
    """Train; one rank fails to take the record of one iteration. Runs on every rank."""
    original = Checkpointing.capture

    def capture(session: Checkpointing, facts: IterationFacts) -> CapturedRecord:
        if os.environ["RANK"] == "1" and facts.iteration == 3:
            raise MemoryError("no room for the record")
        return original(session, facts)

    Checkpointing.capture = capture  # type: ignore[method-assign,assignment]  # this process only
    pretrain_gpt_moe.main(flags)


@pytest.mark.rest
def test_snapshot_that_cannot_be_begun_on_one_rank_fails_on_all_and_later_ones_succeed(
    job: CheckpointJob, expected: Digests
) -> None:
    job.train = train_with_failing_capture
    job.run(storage=True).check()
    assert "another rank has none" in reasons(job, "snapshot")
    (failure,) = [line for line in job.events("degraded", 1) if "MemoryError" in line["reason"]]
    assert (failure["part"], failure["iteration"]) == ("snapshot", 3)
    assert "no room for the record" in failure["traceback"]
    assert job.events("snapshot", 1)[-1]["iteration"] > 3
    assert job.stored()[-1] == 6
    assert job.digests() == expected
