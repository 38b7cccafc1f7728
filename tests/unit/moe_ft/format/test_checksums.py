"""Checksums of many units are computed by several threads, and are those that one thread has."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.format import encoding as module
from moe_ft.format.encoding import checksum, checksums

DEADLINE_S = 120.0
CONTENTS = [memoryview(bytes([number]) * number) for number in (5, 1, 9, 7)]


def meeting(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> set[int]:
    """Have threads compute checksums at the same time, or fail; return their identifiers, later."""
    barrier, threads = threading.Barrier(num_threads), set[int]()

    def together(content: memoryview) -> str:
        if threading.current_thread().name.startswith("moe_ft-checksum"):
            threads.add(threading.get_ident())
            barrier.wait(DEADLINE_S)
        return checksum(content)

    monkeypatch.setattr(module, "num_cores_of_rank", lambda: num_threads + 1)
    monkeypatch.setattr(module, "_LEAST_BYTES", 0)
    monkeypatch.setattr(module, "checksum", together)
    return threads


def test_as_many_threads_as_there_are_cores_work_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting(monkeypatch, 2)
    assert checksums(CONTENTS) == [*map(checksum, CONTENTS)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=9), st.integers(1, 4))
def test_results_are_those_of_one_thread_in_the_order_of_the_contents(
    given_bytes: Sequence[bytes], num_threads: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "num_cores_of_rank", lambda: num_threads + 1)
        monkeypatch.setattr(module, "_LEAST_BYTES", 0)
        assert checksums([memoryview(each) for each in given_bytes]) == [
            *map(checksum, given_bytes)
        ]


def test_largest_content_is_begun_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def note(content: memoryview) -> str:
        begun.append(len(content))
        return checksum(content)

    class InOrder(ThreadPoolExecutor):
        def __init__(self, _: int, name: str) -> None:
            super().__init__(1, name)

    meeting(monkeypatch, 2)
    monkeypatch.setattr(module, "checksum", note)
    monkeypatch.setattr(module, "ThreadPoolExecutor", InOrder)
    checksums(CONTENTS)
    assert begun == [9, 7, 5, 1]


def _no_thread(*_: Any) -> ThreadPoolExecutor:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("num_threads", "least_bytes"), [(1, 0), (4, 100), (4, 0)])
def test_one_core_little_content_and_too_many_threads_leave_the_work_to_the_caller(
    num_threads: int, least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "num_cores_of_rank", lambda: num_threads + 1)
    monkeypatch.setattr(module, "_LEAST_BYTES", least_bytes)
    monkeypatch.setattr(module, "ThreadPoolExecutor", _no_thread)
    assert checksums(CONTENTS) == [*map(checksum, CONTENTS)]
