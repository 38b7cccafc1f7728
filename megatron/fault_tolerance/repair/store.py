"""The job's store in the form of a store of torch: gloo and NCCL meet through it too.

A store of torch that is written in Python needs neither a group nor a server of torch. The connection is that
of moe_ft/cluster/store_client.py; its errors are torch's here.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import override

import torch.distributed as dist

from moe_ft.cluster.store_client import JobStore
from moe_ft.errors import JobStoreError

_ANSWER_S = 30.0  # for values that others write
# gloo asks for the addresses of all ranks of a group at once then, and not twice for each.
_VARIABLE = "GLOO_ENABLE_STORE_V2_API"


class TorchStore(dist.Store):
    """A connection to a job's store. Any thread may use it; one that waits delays others by a second."""

    def __init__(self, store: JobStore, limit_s: float = _ANSWER_S) -> None:
        """Use a connection; ranks that make a group have so many seconds to write their addresses."""
        super().__init__()
        os.environ.setdefault(_VARIABLE, "1")
        self._store = store
        self.set_timeout(timedelta(seconds=limit_s))

    def _wait(self, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        """Return all values when they are there; raises DistStoreError if they are not in time."""
        seconds = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        with _as_torch():
            found = self._store.wait(keys, seconds)
        if found is None:
            raise dist.DistStoreError(
                f"{', '.join(keys)} not in the job's store within {seconds:.0f} s"
            )
        return found

    # As torch calls them: bytes where its callers give texts.

    @override
    def set(self, key: str, value: str | bytes) -> None:
        with _as_torch():
            self._store.set(key, value)

    @override
    def get(self, key: str) -> bytes:
        limit: timedelta = min(self.timeout, timedelta(seconds=_ANSWER_S))  # type: ignore[attr-defined]
        return self._wait([key], limit)[0]

    @override
    def add(self, key: str, amount: int) -> int:
        with _as_torch():
            return self._store.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value."""
        with _as_torch():
            self._store.append(key, value)

    @override
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with _as_torch():
            return self._store.compare_set(key, expected, desired)

    @override
    def check(self, keys: Sequence[str]) -> bool:
        with _as_torch():
            return self._store.check(keys)

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout)

    @override
    def delete_key(self, key: str) -> bool:
        with _as_torch():
            return self._store.delete_key(key)

    @override
    def num_keys(self) -> int:
        with _as_torch():
            return self._store.num_keys()

    @override
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(keys, None)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Tell torch that it may use the two methods before."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 torch's names of them, from C++


@contextmanager
def _as_torch() -> Iterator[None]:
    """Raise DistNetworkError, as torch does, if the store does not answer."""
    try:
        yield
    except JobStoreError as error:
        raise dist.DistNetworkError(str(error)) from error
