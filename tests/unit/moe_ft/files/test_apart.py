"""Operations on storage in another process: the one that asks ends whatever they do, with its locks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moe_ft.engine.persist.storage_lock import LOCK_NAME, StorageLock
from moe_ft.errors import LockLostError, UnsafePathError
from moe_ft.files.apart import Helper
from moe_ft.files.storage import Storage
from moe_ft.processes import has_ended
from moe_ft.recovery.job_memory import alive_lock
from tests.waiting import wait_for

PATIENCE_S = 120.0


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    found = Storage(str(tmp_path / "states"), PATIENCE_S, is_apart=True)
    yield found
    assert isinstance(found._helper, Helper)
    found._helper.abandon()


def test_results_and_errors_are_those_of_operations_in_this_process(
    storage: Storage, tmp_path: Path
) -> None:
    assert storage.iterations() == []
    storage.make_root()
    storage.write_atomically("iter_0000010/a", b"\x00\xff")
    (tmp_path / "states" / "iter_0000020").symlink_to(tmp_path)
    assert storage.iterations() == [10]
    assert storage.read("iter_0000010/a") == storage.read("iter_0000010/a", 0, 2) == b"\x00\xff"
    assert (storage.sizes_in("iter_0000010"), storage.exists("b")) == ({"a": 2}, False)
    storage.remove("iter_0000010/a")
    storage.remove("iter_0000010/a")
    with pytest.raises(FileNotFoundError, match="iter_0000010/a"):
        storage.read("iter_0000010/a")
    with pytest.raises(UnsafePathError, match="iter_0000020 is a symbolic link"):
        storage.write_atomically("iter_0000020/a", b"")


def test_lock_is_taken_renewed_lost_and_released_as_in_this_process(storage: Storage) -> None:
    storage.make_root()
    first, second = StorageLock(storage), StorageLock(storage)
    assert first.take("job", None)
    assert not second.take("job", None)
    before = storage.read(LOCK_NAME)
    first.renew()
    assert storage.read(LOCK_NAME) != before
    with pytest.raises(LockLostError, match="belongs to job 'job'"):
        second.renew()
    first.release()
    assert first.look() is None


def test_operation_that_never_returns_is_given_up_and_the_next_one_works(storage: Storage) -> None:
    storage.make_root()
    storage._patience_s = 0.1
    with pytest.raises(TimeoutError, match="sleep did not return within 0 s"):
        storage.aside("sleep", time.sleep, 1000)
    storage._patience_s = PATIENCE_S
    assert storage.names() == []


_WAITS_FOR_STORAGE = """
import sys, threading, time
from pathlib import Path
from moe_ft.files.storage import Storage
from moe_ft.recovery.job_memory import alive_lock
lock = alive_lock(Path(sys.argv[1]), 0)
lock.acquire()
storage = Storage(sys.argv[1], None, is_apart=True)
storage.make_root()
print(storage._helper._process.pid, flush=True)
if sys.argv[2:]:
    threading.Thread(target=storage.aside, args=("sleep", time.sleep, 1000)).start()
    print("asked", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_process_that_is_killed_ends_with_its_locks_whatever_its_helper_waits_for(
    tmp_path: Path, hangs: bool
) -> None:
    command = [sys.executable, "-c", _WAITS_FOR_STORAGE, str(tmp_path), *["hangs"] * hangs]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        helper = int(asking.stdout.readline())
        assert not hangs or asking.stdout.readline() == b"asked\n"
        try:
            if hangs:
                os.kill(helper, signal.SIGSTOP)  # for one in state D
            asking.kill()
            assert asking.wait(PATIENCE_S) == -signal.SIGKILL
            with alive_lock(tmp_path, 0).acquire(blocking=False):
                pass
            if not hangs:
                wait_for(lambda: has_ended(helper), "the end of the helper")
        finally:
            with suppress(ProcessLookupError):
                os.kill(helper, signal.SIGKILL)
