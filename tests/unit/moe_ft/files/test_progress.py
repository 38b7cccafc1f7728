"""Calls that do not return end in time, and so do all small operations on storage."""

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from moe_ft.files import back_ends
from moe_ft.files import storage as storages
from moe_ft.files.progress import (
    call_within,
    excused_until_s,
    note_progress,
    progress_s,
    waiting,
)
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.faulty_storage import give_up_soon
from tests.unit.simulation.simulated import Simulated


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Return an event for stuck calls to wait for, which then end with the test."""
    event = threading.Event()
    yield event
    event.set()


def test_call_is_a_wait_that_excuses_the_caller() -> None:
    caller = threading.get_ident()
    limit_s = call_within(lambda: excused_until_s(caller), 1000, "looking") - time.monotonic()
    assert limit_s > 900
    assert excused_until_s(caller) <= time.monotonic()


def test_each_piece_of_a_file_that_was_read_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(back_ends, "_CHUNK_BYTES", 2)
    storage = Storage(str(tmp_path), 30)
    noted: list[None] = []
    (tmp_path / "file").write_bytes(b"12345")
    monkeypatch.setattr(storages, "note_progress", lambda: noted.append(None))
    assert storage.read("file") == b"12345"
    assert len(noted) == 3


def test_time_in_which_the_machine_stood_still_is_no_fault_of_a_call() -> None:
    with Simulated() as simulated:

        def answer() -> str:
            for _ in range(2):
                simulated.kernel.sleep(0.5)
            return "answer"

        process = simulated.process(
            lambda: simulated.say(call_within(answer, 30.0, "a short call"))
        )
        simulated.later(0.1, lambda: simulated.kernel.suspend(process, 60.0))
        simulated.run()
        assert simulated.said == ["answer"]


def test_call_that_raises_a_timeout_of_its_own_raises_that_one() -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        call_within(fail, 30, "failing")


class _Held:
    """Something that a caller has, such as a lock or a mapping of memory."""


def test_error_of_a_call_keeps_nothing_of_its_callers_until_a_collection() -> None:
    held: list[weakref.ref[_Held]] = []

    def fail() -> None:
        raise FileNotFoundError

    def call() -> None:
        own = _Held()
        held.append(weakref.ref(own))
        with suppress(FileNotFoundError):
            call_within(fail, 30, "failing")

    gc.disable()
    try:
        call()
        assert held[0]() is None, "a collection may end it on any thread, also on one that it needs"
    finally:
        gc.enable()


def test_call_that_does_not_return_is_named_with_its_deadline(never: threading.Event) -> None:
    with pytest.raises(TimeoutError, match="waiting did not return within 0 s"):
        call_within(never.wait, 0.01, "waiting")


OPERATIONS: dict[str, tuple[str, Callable[[Storage], object]]] = {
    "makedirs": ("create the directory", lambda storage: storage.make_root()),
    "replace": ("write a", lambda storage: storage.write_atomically("a", b"x")),
    "cat_file": ("read b", lambda storage: storage.read("b")),
    "info": ("look at", lambda storage: storage.exists("b")),
    "ls": ("list", lambda storage: storage.iterations()),
    "unlink": ("remove b", lambda storage: storage.remove("b")),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_storage_that_does_not_answer_is_named_with_the_operation(
    tmp_path: Path, never: threading.Event, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "b").write_bytes(b"x")
    operation, act = OPERATIONS[name]
    give_up_soon(monkeypatch, operation)
    storage = Storage(str(tmp_path), patience_s=30)
    owner = os if name in ("replace", "unlink") else storage._file_system
    monkeypatch.setattr(owner, name, lambda *args, **more: never.wait())
    with pytest.raises(TimeoutError, match=f"{tmp_path}: {operation}.* within 0 s"):
        act(storage)


def test_each_piece_of_a_file_that_is_read_has_a_patience_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def call(act: Callable[[], object], patience_s: float, what: str) -> object:
        asked.append(f"{patience_s} {what}")
        return act()

    monkeypatch.setattr("moe_ft.files.storage.call_within", call)
    monkeypatch.setattr("moe_ft.files.back_ends._CHUNK_BYTES", 100)
    content = bytes(range(250))
    (tmp_path / "a").write_bytes(content)
    storage, piece = Storage(str(tmp_path), patience_s=30), f"30 {tmp_path}: read a"
    for arguments, num_pieces in (((0, 200), 2), ((30, 201), 3), ((5,), 3), ((), 3)):
        storage.names()
        asked.clear()
        end = sum(arguments) if len(arguments) == 2 else None
        assert storage.read("a", *arguments) == content[sum(arguments[:1]) : end]
        assert [each for each in asked if "look at" not in each] == [piece] * num_pieces


def test_thread_with_an_event_loop_of_the_user_may_use_storage(tmp_path: Path) -> None:
    async def look() -> bool:
        return Storage(str(tmp_path), patience_s=30).exists("a")

    assert not asyncio.run(look())


def test_back_end_that_does_not_open_is_given_up(
    never: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.files.storage.fsspec.core.url_to_fs", lambda url: never.wait())
    with pytest.raises(TimeoutError, match="sftp://b: open"):
        Storage("sftp://b", patience_s=0.01).names()


def test_wait_excuses_its_thread_up_to_its_limit_and_then_up_to_its_end() -> None:
    found: list[float] = []

    def look() -> None:
        found.append(excused_until_s(threading.get_ident()))

    def wait() -> None:
        look()
        with waiting(100.0):
            look()
            with pytest.raises(TimeoutError), waiting(10.0):
                raise TimeoutError
            look()
        look()

    begin_s = time.monotonic()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    before, within, outer, after = (each - begin_s for each in found)
    assert before < 0 and within >= 100 and outer == within
    assert 0 <= after < 100


def test_progress_is_that_of_the_thread_that_notes_it() -> None:
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(progress_s(threading.get_ident())))
    begin_s = time.monotonic()
    note_progress()
    thread.start()
    thread.join()
    assert begin_s <= progress_s(threading.get_ident()) <= time.monotonic()
    assert seen[0] < begin_s
