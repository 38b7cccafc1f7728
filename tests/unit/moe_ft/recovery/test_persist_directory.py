"""Opening the persist directory: what is refused, and whose lock is taken over."""

import errno
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from moe_ft.config.config import MemoryConfig, MoeFtConfig, StorageConfig
from moe_ft.engine.persist import storage_lock
from moe_ft.engine.persist.storage_lock import LOCK_NAME, Origin, SeenLock, StorageLock
from moe_ft.errors import ConfigError, LockLostError, StorageAwayError
from moe_ft.files.storage import Storage
from moe_ft.launches import Launch
from moe_ft.recovery import persist_directory
from moe_ft.recovery.persist_directory import (
    LateLock,
    open_storage,
    origin_of,
    take_lock,
)
from moe_ft.recovery.site import Site
from moe_ft.topology import RankInfo, Topology
from tests.failing_calls import Rule, build_library, environment


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_lock, "_LOOK_POLL_S", 0.01)
    monkeypatch.setattr(persist_directory, "_LOCK_POLL_S", 0.01)
    monkeypatch.setattr(storage_lock, "LOCK_RENEWAL_S", 0.02)
    # Another start waits for the disk in the first, and a renewal in the other.
    monkeypatch.setattr(storage_lock, "_GAP_S", 5.0)
    monkeypatch.setattr(storage_lock, "_END_S", 60.0)


class Opener:
    """Starts of jobs in one directory."""

    def __init__(self, root: Path) -> None:
        self.url, self._locks = str(root / "persist"), list[StorageLock]()

    def site(self, job_id: str, agent: str = "") -> Site:
        """Return the site of the only rank of a job."""
        storage = StorageConfig(persist_dir=self.url)
        info = RankInfo(rank=0, node="n", stage=0, pid=1, address=None, region_bytes=1, agent=agent)
        return Site(
            config=MoeFtConfig(memory=MemoryConfig(job_id=job_id), storage=storage),
            job_id=job_id,
            node="n",
            node_dir=Path("/nowhere"),
            rank=0,
            topology=Topology(ranks=(info,)),
            launch=Launch(),
        )

    def open(self, job_id: str, agent: str = "") -> StorageLock:
        """Open the directory for a job, and return the lock."""
        site = self.site(job_id, agent=agent)
        opened = open_storage(site)
        assert opened.storage is not None
        if opened.trouble is not None:
            raise ConfigError(opened.trouble.text)
        lock = opened.lock or take_lock(job_id, opened.storage, origin_of(site))
        self._locks.append(lock)
        return lock

    def leave_lock(self, job_id: str) -> StorageLock:
        """Leave what a job that was killed leaves."""
        lock = self.open(job_id)
        lock.close()
        return lock

    def close(self) -> None:
        """End all renewals."""
        for lock in self._locks:
            lock.close()


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path)
    yield opener
    opener.close()


def test_lock_of_another_job_that_does_not_change_is_taken_over(
    opener: Opener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persist_directory, "LOCK_STALE_S", 0.2)
    opener.leave_lock("dead")
    opener.open("new").check()
    assert f"taking over {opener.url} from job 'dead'" in capsys.readouterr().err


def test_lock_of_another_job_that_changes_is_refused(opener: Opener) -> None:
    alive = opener.open("alive")
    with pytest.raises(ConfigError, match="is used by job 'alive' on .*Name another one, or wait"):
        opener.open("new")
    alive.check()


def test_lock_of_another_job_is_refused_and_kept_where_its_file_is_stale_now_and_then(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{opener.url}/{LOCK_NAME}"
    rule = Rule(place=place, call="open", error=errno.ESTALE, every=3)
    for name, value in environment(build_library(tmp_path), rule).items():
        monkeypatch.setenv(name, value)  # of the processes that look and renew
    alive = opener.open("alive")
    with pytest.raises(ConfigError, match="is used by job 'alive' on .*Name another one, or wait"):
        opener.open("new")
    alive.check()


def test_time_in_which_storage_hung_is_no_time_of_watching(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Storage hangs for both jobs; then the other one renews its lock.
    opener.leave_lock("other")
    path, look, now_s, looks = Path(opener.url) / LOCK_NAME, StorageLock.look, [0.0], [0]

    def look_slowly(lock: StorageLock) -> SeenLock | None:
        looks[0] += 1
        now_s[0] += 29.0
        if looks[0] == 5:
            path.write_text('{"job_id":"other","host":"h","heartbeat":7}')
        return look(lock)

    monkeypatch.setattr(StorageLock, "look", look_slowly)
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda seconds: None)
    monkeypatch.setattr(storage_lock, "time", clock)
    with pytest.raises(ConfigError, match="is used by job 'other'"):
        opener.open("new")


def test_lock_of_an_earlier_start_is_left_until_the_start_is_not_refused_any_more(
    opener: Opener,
) -> None:
    earlier = opener.open("job", agent="agent")
    site = opener.site("job", agent="agent")
    opened = open_storage(site)
    assert opened.storage is not None
    assert opened.lock is None
    earlier.check()
    lock = take_lock("job", opened.storage, origin_of(site))
    lock.close()
    with pytest.raises(LockLostError):
        earlier.check()


@pytest.mark.parametrize("content", [b"", b'{"job_id":"live","lin', b'{"job_id": [], "pid": 1}'])
def test_lock_that_cannot_be_understood_is_watched_and_taken_over(
    opener: Opener,
    content: bytes,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(persist_directory, "LOCK_STALE_S", 0.2)
    path = Path(opener.url) / LOCK_NAME
    path.parent.mkdir()
    path.write_bytes(content)
    opener.open("new").check()
    printed = capsys.readouterr().err
    assert "watching for 0 s" in printed
    assert f"taking over {opener.url} from an unknown job" in printed


def test_lock_that_always_changes_hands_is_given_up(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StorageLock, "take", lambda lock, *given: False)
    with pytest.raises(ConfigError, match="several jobs start in this directory"):
        opener.open("new")


def test_password_of_a_url_is_refused_and_not_shown(opener: Opener) -> None:
    opener.url = "nosuch://user:secret@host/path"
    with pytest.raises(ConfigError, match="must hold no password") as caught:
        opener.open("new")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
def test_storage_that_fails_is_in_trouble_that_may_pass(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Storage, "write_atomically", fail)
    trouble = open_storage(opener.site("job")).trouble
    assert trouble is not None
    assert f"--moe-ft-persist-dir={opener.url} cannot be used on node n: OSError" in trouble.text
    assert not trouble.is_of_flags


@pytest.mark.parametrize("url", ["nosuch://host/path", "{file}", "{file}/below", "/proc/nope"])
def test_directory_that_can_never_be_used_is_in_trouble_of_its_flag(
    opener: Opener, tmp_path: Path, url: str
) -> None:
    (tmp_path / "file").touch()
    opener.url = url.format(file=tmp_path / "file")
    trouble = open_storage(opener.site("job")).trouble
    assert trouble is not None
    assert trouble.is_of_flags


def refuse_directory(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Storage, "make_root", fail)


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENAMETOOLONG])
def test_directory_that_no_start_can_make_is_in_trouble_of_its_flag(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_directory(monkeypatch, code)
    trouble = open_storage(opener.site("job")).trouble
    assert trouble is not None
    assert isinstance(trouble.refusal, ConfigError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ETIMEDOUT])
def test_directory_that_a_later_start_may_make_is_in_trouble_that_may_pass(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_directory(monkeypatch, code)
    trouble = open_storage(opener.site("job")).trouble
    assert trouble is not None
    assert isinstance(trouble.refusal, StorageAwayError)


def test_lock_is_taken_when_storage_answers_and_nothing_may_be_written_before(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(persist_directory, "_RETRY_S", 0.01)
    storage, said = Storage(opener.url), queue.Queue[str]()
    storage.make_root()
    lock = LateLock(storage, "job", Origin())
    fails = threading.Event()
    fails.set()
    read = LocalFileSystem.cat_file

    def read_if_it_answers(*args: Any, **more: Any) -> Any:
        if fails.is_set():
            raise OSError(errno.EIO, "away")
        return read(*args, **more)

    monkeypatch.setattr(LocalFileSystem, "cat_file", read_if_it_answers)
    lock.start(said.put)
    assert "no checkpoints go to storage yet: OSError" in said.get(timeout=60)
    with pytest.raises(OSError, match="away"):
        lock.check()
    fails.clear()
    assert "can be used again: checkpoints go there from now on" in said.get(timeout=60)
    assert "watching" not in capsys.readouterr().err  # the lock that it wrote and could not read
    lock.check()
    lock.release()
    assert os.listdir(opener.url) == []
