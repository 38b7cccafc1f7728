"""Starts that cannot work are refused with the reason and the remedy, and change no existing file.

Most tests run one rank; the last ones need two.
"""

import codecs
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import pytest

import pretrain_gpt_moe
from moe_ft.engine.memory.job_directory import file_system_type
from moe_ft.engine.persist import storage_lock
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum
from moe_ft.recovery import claim
from tests.demo_model import layout_flags, model_flags
from tests.harness import JobResult, Train, events, run_training
from tests.jobs import CheckpointJob
from tests.shares import share_of

REFUSED = 2
NOBODY = 65534
TINY = [
    *model_flags(num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=32),
    *("--moe-ffn-hidden-size", "32", "--seq-length", "16", "--max-position-embeddings", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "2"),
    *("--mock-data", "--split", "100,0,0", "--moe-ft-strategy", "dense"),
]
Act = Callable[[Path], object]


def line_of(result: JobResult) -> str:
    """Return the only line that says why a job was refused."""
    assert result.exit_codes[0] == REFUSED, result.output(0)[-2000:]
    assert "Traceback" not in result.output(0)
    lines = result.output(0).splitlines()
    (line,) = [line for line in lines if line.startswith("pretrain_gpt_moe.py: error:")]
    return line


@dataclass(frozen=True)
class Checkpointed:
    """Run of one rank that ended with a checkpoint on storage."""

    result: JobResult
    directory: Path

    @property
    def storage(self) -> Path:
        return self.directory / "storage"


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Checkpointed:
    """Return a run whose memory directory and event log are odd."""
    directory = tmp_path_factory.mktemp("checkpointed")
    (directory / "events").mkdir()
    (directory / "events/rank_00000.jsonl").write_text(
        '{"event":"start"}\n{"event":"start","iteration":0,"incarnation":"two"}\n'
    )
    flags = ["--moe-ft-job-id", "first", "--moe-ft-memory-dir", str(directory / "memory")]
    flags += ["--moe-ft-persist-dir", str(directory / "storage")]
    flags += ["--moe-ft-event-log", str(directory / "events")]
    result = run_training([*TINY, *flags], 1, log_dir=directory).check()
    return Checkpointed(result, directory)


@pytest.mark.rest
def test_event_log_of_lines_that_are_no_events_is_said_and_continued(
    checkpointed: Checkpointed,
) -> None:
    path = checkpointed.directory / "events/rank_00000.jsonl"
    said = f"{path} holds no events that can be read: rank 0 counts its starts from 0"
    assert said in checkpointed.result.output(0)
    (start,) = events(path.parent, 0, "start")
    assert start["incarnation"] == 0


@pytest.mark.rest
def test_memory_directory_that_is_not_on_tmpfs_is_warned_about(
    checkpointed: Checkpointed,
) -> None:
    kind = file_system_type(checkpointed.directory)
    if kind == "tmpfs":
        pytest.skip("the directory for temporary files is on tmpfs")
    output = checkpointed.result.output(0)
    assert f"--moe-ft-memory-dir={checkpointed.directory}/memory is on {kind} on node" in output
    assert "not on tmpfs" in output


@dataclass(frozen=True)
class Case:
    """Start that is refused.

    Attributes:
        flags: the flags that matter; DIR stands for a directory.
        says: words of the line that says why.
        prepare: a function that fills the directory, which may hold a copy of a persist directory.
        has_storage: whether DIR/storage is that copy.
        by_nobody: whether another user starts the job.
    """

    flags: str
    says: tuple[str, ...]
    prepare: Act = lambda directory: None
    has_storage: bool = False
    by_nobody: bool = False


def stored(flags: str, *says: str, damage: Act = lambda storage: None, **more: Any) -> Case:
    """Return a start where there is a checkpoint that `damage` has changed."""
    flags = f"--moe-ft-persist-dir DIR/storage {flags}"
    return Case(flags, says, lambda directory: damage(directory / "storage"), True, **more)


def manifests(storage: Path) -> list[Path]:
    return sorted(storage.glob("iter_*/manifest*.json"))


def write_later_format(storage: Path) -> None:
    """Mark all checkpoints as written in a later format."""
    for path in manifests(storage):
        body = json.loads(path.read_bytes())["body"]
        text = json.dumps(body | {"format": "moe_ft/2"}).encode()
        path.write_bytes(b'{"xxh3_64":"%s","body":%s}\n' % (checksum(text).encode(), text))


def flip_units(storage: Path) -> None:
    for path in storage.glob("iter_*/rank_*.safetensors"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)


def close_manifests(storage: Path) -> None:
    for path in manifests(storage):
        path.chmod(0)


def lock_by_another_user(storage: Path) -> None:
    """Leave the lock of a job that only its user can read."""
    (storage / "moe_ft.lock").write_text('{"job_id":"live","host":"h","owner":"o","heartbeat":1}')
    (storage / "moe_ft.lock").chmod(0)


def unusable(*reasons: str) -> tuple[str, ...]:
    """Return the words of a refusal where there is state and none of it can be used."""
    return (
        "error: there is state of this job in the memory of job 'job' on nodes ",
        " and DIR/storage, and none of it can be used: ",
        *reasons,
        ". Make it usable (bring back the nodes, the files, or the version that wrote it). ",
        "To begin from --load or afresh without it, add --moe-ft-recover-from load: what is on storage stays",
    )


MEMORY_REMEDY = (
    "It must be a directory on a tmpfs in which nobody else can replace what is yours. Name a new one, "
    "for example below /dev/shm."
)
PERSIST_REMEDY = "Name a directory that can be written and answers within "
CASES = {
    "replicas without other nodes": Case(
        "--moe-ft-replication-factor 1",
        (
            "--moe-ft-replication-factor=1: 1 replicas need 2 nodes, there are 1. Lower it, or start",
        ),
    ),
    "memory limit": Case(
        "--moe-ft-host-memory-limit 0",
        (
            "--moe-ft-host-memory-limit=0: snapshots and replicas take ",
            "more than the limit. Raise it if the node has the memory. Lower ",
        ),
    ),
    "memory directory that is a file": Case(
        "--moe-ft-memory-dir DIR/file",
        ("--moe-ft-memory-dir=DIR/file with ", "[Errno 20] Not a directory", MEMORY_REMEDY),
        lambda directory: (directory / "file").touch(),
    ),
    "memory directory that cannot be made": Case(
        "--moe-ft-memory-dir /proc/x",
        ("--moe-ft-memory-dir=/proc/x with ", "[Errno 2] No such file", MEMORY_REMEDY),
    ),
    "persist directory that is a file": Case(
        "--moe-ft-persist-dir DIR/file",
        ("--moe-ft-persist-dir=DIR/file cannot be used on node ", "File exists", PERSIST_REMEDY),
        lambda directory: (directory / "file").touch(),
    ),
    "persist directory that cannot be made": Case(
        "--moe-ft-persist-dir /proc/x",
        ("--moe-ft-persist-dir=/proc/x cannot be used on node ", "No such file", PERSIST_REMEDY),
    ),
    "unknown protocol": Case(
        "--moe-ft-persist-dir foo://x",
        ("--moe-ft-persist-dir=foo://x cannot be used", "Protocol not known: foo", PERSIST_REMEDY),
    ),
    "lock that is a directory": Case(
        "--moe-ft-persist-dir DIR/locked",
        (
            "--moe-ft-persist-dir=DIR/locked: moe_ft.lock there may be a running job's, and it cannot be "
            "read ([Errno 21] Is a directory",
            "if no job uses this one, remove DIR/locked/moe_ft.lock by hand.",
        ),
        lambda directory: (directory / "locked/moe_ft.lock").mkdir(parents=True),
    ),
    "nothing there": Case(
        "--moe-ft-on-missing fail",
        (
            "--moe-ft-on-missing=fail: nothing to recover from in the memory of job 'job' on nodes ",
            ": it is empty. Use --moe-ft-on-missing start to begin from --load or afresh.",
        ),
    ),
    "iteration that is not there": stored(
        "--moe-ft-recover-from iter_99999",
        "--moe-ft-recover-from=iter_99999 cannot be used. Complete in the memory of job 'job' on ",
        " and DIR/storage: 2. Name one of them, or auto. To begin from --load or afresh without it, add",
    ),
    "another model": stored(
        "--hidden-size 64 --seed 5",
        "DIR/storage/iter_0000002 holds the state of another model, layout or data: ",
        "--hidden-size: 32 there, 64 now",
        "--seed: 1234 there, 5 now",
        "name another --moe-ft-persist-dir or --moe-ft-job-id, ",
        "or ignore it with --moe-ft-recover-from load.",
    ),
    "later format": stored(
        "",
        *unusable(
            "DIR/storage/iter_0000002/manifest.json has format 'moe_ft/2', this version reads moe_ft/1"
        ),
        damage=write_later_format,
    ),
    "damage everywhere": stored(
        "",
        *unusable("does not match its checksum", "iteration 2: rank 0 has no intact "),
        damage=flip_units,
    ),
    "unreadable manifest": stored(
        "",
        *unusable("DIR/storage/iter_0000002/manifest.json cannot be read: PermissionError"),
        damage=close_manifests,
        by_nobody=True,
    ),
    "unreadable lock": stored(
        "",
        "--moe-ft-persist-dir=DIR/storage: moe_ft.lock there may be a running job's, and it cannot be read "
        "([Errno 13] Permission denied",
        "Name another one, or, if no job uses this one, remove DIR/storage/moe_ft.lock by hand.",
        damage=lock_by_another_user,
        by_nobody=True,
    ),
}


def train_as_nobody(flags: list[str]) -> None:
    """Train as a user who owns nothing, if this process may become one. Runs on every rank."""
    codecs.lookup("idna")  # loaded late; only root may be able to read this Python
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    pretrain_gpt_moe.main(flags)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield an empty directory that every user can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def refusal(flags: str, directory: Path, memory_dir: Path, *, train: Train | None = None) -> str:
    """Start a job of one rank that is refused; return the reason, with DIR for the directory."""
    words = [word.replace("DIR", str(directory)) for word in flags.split()]
    known = ["--moe-ft-job-id", "job", "--moe-ft-memory-dir", str(memory_dir)]
    log_dir = Path(tempfile.mkdtemp(prefix="log_", dir=directory))
    result = run_training([*TINY, *known, *words], 1, log_dir=log_dir, train=train)
    return line_of(result).replace(str(directory), "DIR")


def content_of(storage: Path) -> dict[Path, bytes | None]:
    return {
        path: path.read_bytes() if path.is_file() and os.access(path, os.R_OK) else None
        for path in storage.rglob("*")
    }


@pytest.mark.parametrize("name", share_of(CASES, "memory directory that is a file"))
def test_start_that_cannot_work_is_refused_with_its_reason_and_changes_nothing_on_storage(
    name: str, directory: Path, memory_dir: Path, request: pytest.FixtureRequest
) -> None:
    case, storage = CASES[name], directory / "storage"
    if case.has_storage:
        shutil.copytree(request.getfixturevalue("checkpointed").storage, storage)
    case.prepare(directory)
    if case.by_nobody and os.geteuid() == 0:
        os.chown(memory_dir, NOBODY, NOBODY)
        storage.chmod(0o777)
    before = content_of(storage)
    train = train_as_nobody if case.by_nobody else None
    line = refusal(case.flags, directory, memory_dir, train=train)
    for words in case.says:
        assert words in line
    assert content_of(storage) == before


@pytest.mark.rest
@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_url_whose_package_is_not_installed_is_refused(directory: Path, memory_dir: Path) -> None:
    line = refusal("--moe-ft-persist-dir s3://x/y", directory, memory_dir)
    assert "--moe-ft-persist-dir=s3://x/y cannot be used" in line
    assert "Install s3fs to access S3" in line


@pytest.mark.rest
def test_file_systems_that_are_small_or_read_only_are_refused(
    directory: Path, memory_dir: Path, mount_small: Callable[[str], Path]
) -> None:
    small = mount_small("300k")
    line = refusal(f"--moe-ft-memory-dir {small}", directory, memory_dir)
    assert f"--moe-ft-memory-dir={small}: snapshots and replicas take" in line
    assert "Enlarge it (mount -o remount,size=...). Lower --moe-ft-replication-factor" in line
    read_only = mount_small("1m,ro")
    line = refusal(f"--moe-ft-persist-dir {read_only}", directory, memory_dir)
    assert f"--moe-ft-persist-dir={read_only} cannot be used on node" in line
    assert "Read-only file system" in line


@pytest.mark.rest
def test_everything_in_memory_is_private(directory: Path, memory_dir: Path) -> None:
    flags = ["--moe-ft-job-id", "job", "--moe-ft-memory-dir", str(memory_dir)]
    flags += ["--exit-interval", "1"]
    run_training([*TINY, *flags], 1, log_dir=directory).check()
    paths = list(memory_dir.rglob("*"))
    assert any(path.name.startswith("region_") for path in paths)
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_persist_directory_of_another_running_job_is_refused_by_all_ranks(
    job: CheckpointJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_lock, "LOCK_RENEWAL_S", 0.1)
    job.storage.mkdir()
    other = StorageLock(Storage(str(job.storage)))
    assert other.take("other", None)
    other.start(print)
    try:
        line = line_of(job.run(storage=True))
    finally:
        other.close()
    assert "is used by job 'other' on" in line
    assert "Name another one, or wait until that job has ended." in line


def train_impatiently(flags: list[str]) -> None:
    """Train without waiting for ranks of an older start to end. Runs on every rank."""
    claim._OLD_START_S = 0.1
    pretrain_gpt_moe.main(flags)


@pytest.mark.rest
def test_second_job_of_the_same_name_is_refused_by_rank_0_where_another_rank_finds_it(
    job: CheckpointJob,
) -> None:
    directory = job.memory_dir / "test/here"
    directory.mkdir(parents=True, mode=0o700)
    job.train = train_impatiently
    with filelock.FileLock(directory / "rank_00001.alive"):
        line = line_of(job.run("--moe-ft-node-id", "here"))
    assert "rank 1 of a job of this name is running on node here already" in line
    assert "Give this job another name, or end the other one." in line


@pytest.mark.rest
def test_state_of_another_layout_is_refused_with_what_differs(job: CheckpointJob) -> None:
    job.run("--exit-interval", "1", storage=True).check()
    line = line_of(job.run(*layout_flags({"pp": 2, "ep": 1}), storage=True))
    assert "--expert-model-parallel-size: 2 there, 1 now" in line
    assert "--pipeline-model-parallel-size: 1 there, 2 now" in line
    line = line_of(job.run("--overlap-grad-reduce", "--ddp-num-buckets", "4", storage=True))
    assert "cuts of the state (--overlap-grad-reduce, " in line
