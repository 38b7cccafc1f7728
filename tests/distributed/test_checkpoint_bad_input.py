"""Starts that cannot work are refused with the reason and the remedy, and change no existing file.

Most tests run one rank; the last ones need two.
"""

import codecs
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
from moe_ft.recovery import job_memory
from tests.demo_model import layout_flags, model_flags
from tests.harness import JobResult, Train, run_training
from tests.jobs import CheckpointJob, refusal
from tests.shares import share_of

NOBODY = 65534
TINY = [
    *model_flags(num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=32),
    *("--moe-ffn-hidden-size", "32", "--seq-length", "16", "--max-position-embeddings", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "2"),
    *("--mock-data", "--split", "100,0,0", "--moe-ft-strategy", "dense"),
]
Act = Callable[[Path], object]


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobResult, Path]:
    """Return a run of one rank that ended with a checkpoint on storage, and its folder."""
    directory = tmp_path_factory.mktemp("checkpointed")
    flags = ["--moe-ft-job-id", "first", "--moe-ft-memory-dir", str(directory / "memory")]
    flags += ["--moe-ft-persist-dir", str(directory / "storage")]
    return run_training([*TINY, *flags], 1, log_dir=directory).check(), directory


@pytest.mark.rest
def test_memory_directory_that_is_not_on_tmpfs_is_warned_about(
    checkpointed: tuple[JobResult, Path],
) -> None:
    result, directory = checkpointed
    kind = file_system_type(directory)
    if kind == "tmpfs":
        pytest.skip("the directory for temporary files is on tmpfs")
    output = result.output(0)
    assert f"--moe-ft-memory-dir={directory}/memory is on {kind} on node" in output
    assert "not on tmpfs" in output


@dataclass(frozen=True)
class Case:
    """Start that is refused.

    Attributes:
        flags: the flags that matter; DIR stands for a directory.
        says: words of the line that says why: the flag with its value, and the reason.
        prepare: a function that fills the directory.
        damage: a function that changes a checkpoint in DIR/storage; None if there is none.
        by_nobody: whether another user starts the job.
    """

    flags: str
    says: tuple[str, ...]
    prepare: Act = lambda directory: None
    damage: Act | None = None
    by_nobody: bool = False


def stored(flags: str, *says: str, damage: Act = lambda storage: None, **more: Any) -> Case:
    """Return a start where there is a checkpoint that `damage` has changed."""
    return Case(f"--moe-ft-persist-dir DIR/storage {flags}", says, damage=damage, **more)


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


def make_file(directory: Path) -> None:
    (directory / "file").touch()


UNUSABLE = "none of it can be used: "
CASES = {
    "replicas without other nodes": Case(
        "--moe-ft-replication-factor 1",
        ("--moe-ft-replication-factor=1: ", "need 2 nodes, there are 1"),
    ),
    "memory limit": Case(
        "--moe-ft-host-memory-limit 0", ("--moe-ft-host-memory-limit=0: ", "more than the limit")
    ),
    "memory directory that is a file": Case(
        "--moe-ft-memory-dir DIR/file",
        ("--moe-ft-memory-dir=DIR/file with ", "Not a directory", "Name a new one, "),
        make_file,
    ),
    "memory directory that cannot be made": Case(
        "--moe-ft-memory-dir /proc/x", ("--moe-ft-memory-dir=/proc/x with ", "No such file")
    ),
    "persist directory that is a file": Case(
        "--moe-ft-persist-dir DIR/file",
        ("--moe-ft-persist-dir=DIR/file cannot be used on node ", "File exists"),
        make_file,
    ),
    "persist directory that cannot be made": Case(
        "--moe-ft-persist-dir /proc/x", ("--moe-ft-persist-dir=/proc/x cannot", "No such file")
    ),
    "unknown protocol": Case(
        "--moe-ft-persist-dir foo://x",
        ("--moe-ft-persist-dir=foo://x cannot be used", "Protocol not known: foo"),
    ),
    "lock that is a directory": Case(
        "--moe-ft-persist-dir DIR/locked",
        ("--moe-ft-persist-dir=DIR/locked: ", "Is a directory", "remove DIR/locked/moe_ft.lock"),
        lambda directory: (directory / "locked/moe_ft.lock").mkdir(parents=True),
    ),
    "nothing there": Case(
        "--moe-ft-on-missing fail", ("--moe-ft-on-missing=fail: ", "--moe-ft-on-missing start")
    ),
    "iteration that is not there": stored(
        "--moe-ft-recover-from iter_99999",
        "--moe-ft-recover-from=iter_99999 cannot be used. Complete in ",
        " and DIR/storage: 2. ",
    ),
    "another model": stored(
        "--hidden-size 64 --seed 5",
        "DIR/storage/iter_0000002 holds the state of another model",
        "--hidden-size: 32 there, 64 now",
        "--seed: 1234 there, 5 now",
    ),
    "later format": stored(
        "",
        UNUSABLE,
        "DIR/storage/iter_0000002/manifest.json has format 'moe_ft/2', this version reads moe_ft/1",
        damage=write_later_format,
    ),
    "damage everywhere": stored(
        "",
        UNUSABLE,
        "does not match its checksum",
        "iteration 2: rank 0 has no intact ",
        "add --moe-ft-recover-from load",
        damage=flip_units,
    ),
    "unreadable manifest": stored(
        "",
        UNUSABLE,
        "DIR/storage/iter_0000002/manifest.json cannot be read: PermissionError",
        damage=close_manifests,
        by_nobody=True,
    ),
    "unreadable lock": stored(
        "",
        "--moe-ft-persist-dir=DIR/storage: ",
        "[Errno 13] Permission denied",
        "remove DIR/storage/moe_ft.lock",
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


def refused(flags: str, directory: Path, memory_dir: Path, *, train: Train | None = None) -> str:
    """Start a job of one rank that is refused; return the reason, with DIR for the directory."""
    words = [word.replace("DIR", str(directory)) for word in flags.split()]
    known = ["--moe-ft-job-id", "job", "--moe-ft-memory-dir", str(memory_dir)]
    log_dir = Path(tempfile.mkdtemp(prefix="log_", dir=directory))
    result = run_training([*TINY, *known, *words], 1, log_dir=log_dir, train=train)
    return refusal(result).replace(str(directory), "DIR")


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
    case.prepare(directory)
    if case.damage is not None:
        shutil.copytree(request.getfixturevalue("checkpointed")[1] / "storage", storage)
        case.damage(storage)
    if case.by_nobody and os.geteuid() == 0:
        os.chown(memory_dir, NOBODY, NOBODY)
        storage.chmod(0o777)
    before = content_of(storage)
    train = train_as_nobody if case.by_nobody else None
    line = refused(case.flags, directory, memory_dir, train=train)
    for words in case.says:
        assert words in line
    assert content_of(storage) == before


@pytest.mark.rest
def test_file_systems_that_are_small_or_read_only_are_refused(
    directory: Path, memory_dir: Path, mount_small: Callable[[str], Path]
) -> None:
    small = mount_small("300k")
    line = refused(f"--moe-ft-memory-dir {small}", directory, memory_dir)
    assert f"--moe-ft-memory-dir={small}: snapshots" in line
    assert "Enlarge it (mount -o remount,size=...). Lower --moe-ft-replication-factor" in line
    read_only = mount_small("1m,ro")
    line = refused(f"--moe-ft-persist-dir {read_only}/new", directory, memory_dir)
    assert f"--moe-ft-persist-dir={read_only}/new cannot be used on node" in line
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
        line = refusal(job.run(storage=True))
    finally:
        other.close()
    assert "is used by job 'other' on" in line
    assert "Name another one, or wait until that job has ended." in line


def train_impatiently(flags: list[str]) -> None:
    """Train without waiting for ranks of an older start to end. Runs on every rank."""
    job_memory._OLD_START_S = 0.1
    pretrain_gpt_moe.main(flags)


@pytest.mark.rest
def test_second_job_of_the_same_name_is_refused_by_rank_0_where_another_rank_finds_it(
    job: CheckpointJob,
) -> None:
    directory = job.memory_dir / "test/here"
    directory.mkdir(parents=True, mode=0o700)
    job.train = train_impatiently
    with filelock.FileLock(directory / "rank_00001.alive"):
        line = refusal(job.run("--moe-ft-node-id", "here"))
    assert "rank 1 of a job of this name is running on node here already" in line
    assert "Give this job another name, or end the other one." in line


@pytest.mark.rest
def test_state_of_another_layout_is_refused_with_what_differs(job: CheckpointJob) -> None:
    job.run("--exit-interval", "1", storage=True).check()
    line = refusal(job.run(*layout_flags({"pp": 2, "ep": 1}), storage=True))
    assert "--expert-model-parallel-size: 2 there, 1 now" in line
    assert "--pipeline-model-parallel-size: 1 there, 2 now" in line
    line = refusal(job.run("--overlap-grad-reduce", "--ddp-num-buckets", "4", storage=True))
    assert "cuts of the state (--overlap-grad-reduce, " in line
