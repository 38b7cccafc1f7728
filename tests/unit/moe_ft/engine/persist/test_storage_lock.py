"""The lock of a persist directory: who gets it, who keeps it, and who notices that it is lost."""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from moe_ft.engine.persist import storage_lock
from moe_ft.engine.persist.storage_lock import LOCK_NAME, Lock, StorageLock, watch_lock
from moe_ft.errors import LockLostError
from moe_ft.files.storage import Storage
from tests.object_store import ObjectStore
from tests.unit.moe_ft.engine.persist.checkpoints import FAULTY
from tests.unit.moe_ft.faulty_storage import Injector, faulty_urls, install
from tests.waiting import wait_for

NUM_STARTS = 6


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SETTLE_S", "_GAP_S"):
        monkeypatch.setattr(storage_lock, name, 0.0)


@pytest.fixture
def injector() -> Iterator[Injector]:
    with install() as injector:
        yield injector


@pytest.fixture(params=["local", "objects", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, injector: Injector) -> Storage:
    if request.param == "s3":
        store: ObjectStore = request.getfixturevalue("s3")
        return Storage(f"{store.bucket()}/persist")
    storage = Storage(faulty_urls(tmp_path)[request.param])
    storage.make_root()
    return storage


@pytest.fixture
def directory(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


def taken(storage: Storage, job_id: str = "job") -> StorageLock:
    lock = StorageLock(storage)
    assert lock.take(job_id, lock.look())
    return lock


def content_of(storage: Storage) -> Lock:
    seen = StorageLock(storage).look()
    assert seen is not None
    assert seen.lock is not None
    return seen.lock


# Taking


def test_lock_that_another_start_has_taken_since_is_not_taken(storage: Storage) -> None:
    first = taken(storage, "a")
    assert not StorageLock(storage).take("b", None)
    first.check()


@pytest.mark.parametrize("is_stale", [False, True])
def test_lock_that_several_starts_take_at_once_goes_to_one(
    tmp_path: Path, directory: Storage, is_stale: bool
) -> None:
    if is_stale:
        taken(directory, "dead")
    seen = StorageLock(directory).look()
    barrier, got = threading.Barrier(NUM_STARTS), []

    def start(number: int) -> None:
        lock = StorageLock(directory)
        barrier.wait()
        if lock.take(f"job {number}", seen):
            got.append(lock)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(NUM_STARTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = got
    winner.check()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_lock_on_a_file_system_without_links_goes_to_one(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr("moe_ft.engine.persist.storage_lock.os.link", refuse)
    lock = taken(directory)
    assert not StorageLock(directory).take("other", None)
    lock.check()


def test_lock_of_which_a_back_end_reports_its_own_error_belongs_to_another(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conflict(*args: object, **more: object) -> None:
        raise RuntimeError("412 precondition failed")

    first = taken(storage)
    monkeypatch.setattr(storage._file_system, "pipe_file", conflict)
    assert not StorageLock(storage).take("other", None)
    first.check()


def test_lock_without_a_conditional_put_goes_to_the_last_that_wrote(
    injector: Injector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(faulty_urls(tmp_path)["objects"])
    monkeypatch.setattr("moe_ft.files.back_ends._has_conditional_put", lambda file_system: False)
    other = msgspec.json.encode(Lock(job_id="other", host="h", owner="o"))

    def let_the_other_write(seconds: float) -> None:
        storage.write_atomically(LOCK_NAME, other)

    monkeypatch.setattr("moe_ft.engine.persist.storage_lock.time.sleep", let_the_other_write)
    assert not StorageLock(storage).take("job", None)


# What is there


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"job_id": 1}', b"\xff", b'{"a":' * 5000]
)
def test_lock_that_cannot_be_understood_is_there(storage: Storage, content: bytes) -> None:
    storage.write_atomically(LOCK_NAME, content)
    seen = StorageLock(storage).look()
    assert seen is not None
    assert seen.lock is None
    assert seen.holder == "an unknown job (its content is not a lock's)"


@pytest.mark.parametrize(
    "content",
    [
        b'{"job_id":"a","host":"h","owner":"o","heartbeat":3,"pid":12}',
        b'{"job_id":"a","lineage":"","host":"h","heartbeat_s":1.5}',
    ],
    ids=["later", "earlier"],
)
def test_lock_of_another_version_is_understood(storage: Storage, content: bytes) -> None:
    storage.write_atomically(LOCK_NAME, content)
    assert content_of(storage).job_id == "a"


# Renewing


def test_lock_that_is_renewed_changes_for_those_who_watch(storage: Storage) -> None:
    lock = taken(storage)
    seen = [lock.look()]
    for number in range(1, 12):
        lock.renew()
        assert lock.look() not in seen
        assert content_of(storage).heartbeat == number
        seen.append(lock.look())


def test_lock_of_an_old_start_that_was_taken_over_is_lost_to_it(storage: Storage) -> None:
    zombie = taken(storage)
    present = taken(storage)
    for act in (zombie.check, zombie.renew):
        with pytest.raises(LockLostError, match="belongs to job 'job' on .*: this job writes no"):
            act()
    present.check()


def test_lock_that_changes_hands_during_a_renewal_stays_with_the_new_owner(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = taken(directory, "first"), StorageLock(directory)
    advanced = storage_lock._advanced

    def be_slow(content: bytes, owner: str, url: str) -> bytes:
        following = advanced(content, owner, url)
        if owner == first.owner and not first_check.is_set():
            first_check.set()
        elif owner == first.owner:
            assert second.take("second", second.look())
        return following

    first_check = threading.Event()
    monkeypatch.setattr(storage_lock, "_advanced", be_slow)
    first.renew()
    second.check()


def test_lock_that_another_start_holds_in_its_hands_for_a_moment_is_not_lost(
    tmp_path: Path, directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, path = taken(directory), tmp_path / LOCK_NAME
    path.rename(tmp_path / "hand")
    put_back = lambda seconds: (tmp_path / "hand").rename(path)  # noqa: E731
    monkeypatch.setattr("moe_ft.engine.persist.storage_lock.time.sleep", put_back)
    lock.check()


@FAULTY
def test_lock_on_storage_that_fails_is_not_lost(storage: Storage, injector: Injector) -> None:
    lock = taken(storage)
    injector.broken = (("open", LOCK_NAME), ("cat_file", LOCK_NAME))
    for act in (lock.check, lock.look):
        with pytest.raises(OSError, match="injected failure") as caught:
            act()
        assert not isinstance(caught.value, LockLostError)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCK_RENEWAL_S", "_AGAIN_S"):
        monkeypatch.setattr(storage_lock, name, 0.005)
    # Another start waits for the disk in the first, and a renewal in the other.
    monkeypatch.setattr(storage_lock, "_GAP_S", 5.0)
    monkeypatch.setattr(storage_lock, "_END_S", 60.0)


def test_lock_that_was_started_is_renewed_until_it_is_closed(
    directory: Storage, quick: None
) -> None:
    lock = taken(directory)
    lock.start(lambda line: None)
    wait_for(lambda: content_of(directory).heartbeat > 1, "renewals")
    lock.close()
    assert lock._thread is not None
    assert not lock._thread.is_alive()


def test_lock_that_is_lost_during_renewals_is_reported_once(
    directory: Storage, quick: None
) -> None:
    lock, lines = taken(directory), list[str]()
    lock.start(lines.append)
    wait_for(lambda: StorageLock(directory).take("other", lock.look()), "the other to take it")
    assert lock._thread is not None
    lock._thread.join(120)
    (line,) = lines
    assert "belongs to job 'other'" in line


@FAULTY
def test_lock_that_cannot_be_renewed_for_a_while_is_reported_once_and_kept(
    storage: Storage, injector: Injector, quick: None
) -> None:
    lock, lines = taken(storage), list[str]()
    injector.broken = (("open", LOCK_NAME), ("cat_file", LOCK_NAME))
    lock.start(lines.append)
    wait_for(lambda: len(injector.operations) > 20, "some attempts")
    injector.forget()
    wait_for(lambda: content_of(storage).heartbeat > 0, "a renewal")
    lock.close()
    assert [line.partition(":")[0] for line in lines] == [
        f"{LOCK_NAME} in {storage.url.partition(':')[0]}"
    ]


def test_renewal_that_fails_is_made_again_long_before_another_start_may_take_the_lock(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, waits = taken(directory), list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 4

    def renew(lock: StorageLock) -> None:
        if len(waits) in (1, 2):
            raise OSError(errno.EIO, "for now")

    monkeypatch.setattr(lock, "_should_end", SimpleNamespace(wait=wait))
    monkeypatch.setattr(StorageLock, "renew", renew)
    lock._keep(lambda line: None)
    assert waits == [storage_lock.LOCK_RENEWAL_S, 1.0, 1.0, *[storage_lock.LOCK_RENEWAL_S] * 2]


def test_lock_that_cannot_be_read_in_the_hands_of_another_start_is_given_back(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, other = taken(directory), StorageLock(directory)
    seen = lock.look()
    assert seen is not None

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "not this time")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="not this time"):
        other._file.remove(seen.content)
    lock.check()


# Watching


@pytest.mark.parametrize("does", ["nothing", "renew", "release"])
def test_lock_that_is_watched_shows_what_its_owner_does(
    directory: Storage, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    owner, watched = taken(directory), StorageLock(directory)
    seen = watched.look()
    assert seen is not None
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        if does != "nothing" and now_s[0] == 3.0:
            getattr(owner, does)()

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now_s[0])
    monkeypatch.setattr(storage_lock, "time", clock)
    found = watch_lock(watched, seen, 12.0)
    assert now_s[0] == (12.0 if does == "nothing" else 3.0)
    assert found == watched.look()
    assert (found == seen, found is None) == (does == "nothing", does == "release")


# Releasing


@pytest.mark.parametrize("content", [None, b"torn", b'{"job_id":"job","host":"h","owner":"o"}'])
def test_lock_that_is_not_this_starts_is_not_released(
    storage: Storage, content: bytes | None
) -> None:
    lock = taken(storage)
    if content is None:
        storage.remove(LOCK_NAME)
    else:
        storage.write_atomically(LOCK_NAME, content)
    lock.release()
    assert storage.exists(LOCK_NAME) == (content is not None)
