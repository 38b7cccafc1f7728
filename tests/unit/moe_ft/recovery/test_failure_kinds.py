"""Kinds of failures, told from exceptions as they are really raised."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from moe_ft.errors import (
    ConfigError,
    CorruptionError,
    LinksEndedError,
    RepairError,
    StorageAwayError,
    UnrecoverableError,
)
from moe_ft.recovery.failures import failure_of, kind_of
from moe_ft.verdicts import Failure, FailureKind

CODE, DATA, NETWORK = FailureKind.CODE, FailureKind.DATA, FailureKind.NETWORK
DEVICE, STORAGE, NO_MEMORY = FailureKind.DEVICE, FailureKind.STORAGE, FailureKind.OUT_OF_MEMORY


class Bad(Dataset[int]):
    """A data set whose second sample cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise self.error
        return index


def load(error: Exception, num_workers: int) -> None:
    batches: Any = iter(DataLoader(Bad(error), batch_size=1, num_workers=num_workers))
    try:
        list(batches)
    finally:
        for each in getattr(batches, "_workers", ()):  # torch would wait 5 s for it
            each.kill()
            each.join()


def wait_in_vain() -> None:
    """Take part in a collective of gloo in which the other rank does not."""
    store, groups = dist.HashStore(), list[Any]()

    def connect(rank: int) -> None:
        groups.append(dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=0.2)))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    groups[0].allreduce([torch.ones(1)]).wait()


def refuse_connection() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        socket.create_connection(free.getsockname()).close()


def run_into_a_cause(cause: Exception) -> None:
    try:
        raise cause
    except Exception as error:
        raise ValueError("while the step ran") from error


def get_batch(rows: dict[str, int]) -> int:
    return rows["tokens"]


def read_rows() -> Iterator[int]:
    yield from ()


class Rows:
    """An iterator without a row."""

    def __next__(self) -> int:
        return next(read_rows())


def raising(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def told[Told](act: Callable[[], object], tell: Callable[[Exception], Told]) -> Told:
    """Return what is told of the exception of a call, and keep nothing alive that its frames hold."""
    try:
        act()
    except Exception as error:
        return tell(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (lambda: torch.ones(2) @ torch.ones(3), CODE),
        (lambda: [][3], CODE),
        (raising(ValueError("no such store, socket or connection")), CODE),
        (lambda: load(ValueError("sample 1"), 0), DATA),
        (lambda: load(KeyError("text"), 1), DATA),
        (lambda: get_batch({}), DATA),
        (lambda: next(Rows()), DATA),
        (lambda: load(ConnectionResetError("by the bucket"), 0), STORAGE),
        (lambda: load(OSError(errno.EIO, "cannot be read"), 1), STORAGE),
        (lambda: bytearray(1 << 62), NO_MEMORY),
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), NO_MEMORY),
        (raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")), NO_MEMORY),
        (raising(OSError(errno.ENOMEM, "fork")), NO_MEMORY),
        (lambda: load(MemoryError(), 0), NO_MEMORY),
        (wait_in_vain, NETWORK),
        (lambda: dist.HashStore().wait(["never"], timedelta(milliseconds=1)), NETWORK),
        (refuse_connection, NETWORK),
        (raising(dist.DistBackendError("NCCL error: unhandled cuda error")), NETWORK),
        (raising(LinksEndedError("ended")), NETWORK),
        (raising(RepairError("given up")), NETWORK),
        (raising(RuntimeError("CUDA error: unspecified launch failure")), DEVICE),
        (raising(torch.AcceleratorError("CUDA error: uncorrectable ECC error")), DEVICE),
        (raising(dist.DistBackendError("NCCL: uncorrectable NVLink error")), DEVICE),
        (raising(RuntimeError("CUDA error: device-side assert triggered")), CODE),
        (lambda: os.open("/proc/none/file", os.O_WRONLY), CODE),
        (raising(OSError(errno.ENOSPC, "No space left on device")), STORAGE),
        (raising(StorageAwayError("the bucket does not answer")), STORAGE),
        (raising(ConfigError("--flag")), FailureKind.REFUSED),
        (raising(UnrecoverableError("nothing")), FailureKind.REFUSED),
        (raising(CorruptionError("sums")), FailureKind.CORRUPTION),
        (raising(RuntimeError("found NaN in local grad norm")), FailureKind.REJECTED),
        (lambda: run_into_a_cause(MemoryError()), NO_MEMORY),
        (lambda: run_into_a_cause(ValueError()), CODE),
    ],
)
def test_kind_is_told_by_class_text_and_place(act: Callable[[], object], kind: FailureKind) -> None:
    assert told(act, kind_of) is kind


def test_storage_that_fails_in_its_own_code_is_no_network() -> None:
    code = compile("def get():\n raise TimeoutError('slow')", "/site/fsspec/asyn.py", "exec")
    names = dict[str, Any]()
    exec(code, names)
    assert told(names["get"], kind_of) is STORAGE


def test_failure_names_the_original_exception_of_a_data_process() -> None:
    found = told(
        lambda: load(ValueError("sample 1"), 1),
        lambda error: failure_of(error, rank=2, iteration=5, section="iteration", node="b"),
    )
    assert found == Failure(
        rank=2, kind=DATA, what="ValueError: sample 1", iteration=5, section="iteration", node="b"
    )


def test_same_failure_has_the_same_words_in_each_start() -> None:
    texts = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB of which {} MiB is free",
        "DataLoader worker (pid {}) is killed by signal: Killed",
        "no object at 0x{}f",
    )
    for text in texts:
        one, other = (
            failure_of(RuntimeError(text.format(number)), rank=0, iteration=1) for number in (1, 22)
        )
        assert one.is_same(other) and "22" not in other.what
