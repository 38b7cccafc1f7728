"""The job's store in the form of a store of torch: gloo and NCCL meet through it too.

A store of torch that is written in Python needs neither a group nor a server of torch. The connection is that
of moe_ft/cluster/store_client.py; its errors are torch's here.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, override

import torch.distributed as dist

from moe_ft.cluster.store_client import JobStore
from moe_ft.errors import JobStoreError

_ANSWER_S = 30.0  # for values that others write
# gloo asks for the addresses of all ranks of a group at once then, and not twice for each.
_VARIABLE = "GLOO_ENABLE_STORE_V2_API"


@contextmanager
def _as_torch() -> Iterator[None]:
    """Raise DistNetworkError, as torch does, if the store does not answer."""
    try:
        yield
    except JobStoreError as error:
        raise dist.DistNetworkError(str(error)) from error


def _asked(name: str) -> Callable[..., Any]:
    """Return what asks the job's store by its function of a name."""

    def ask(store: "TorchStore", *args: Any) -> Any:
        with _as_torch():
            return getattr(store._store, name)(*args)

    return ask


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
    def get(self, key: str) -> bytes:
        limit: timedelta = min(self.timeout, timedelta(seconds=_ANSWER_S))  # type: ignore[attr-defined]
        return self._wait([key], limit)[0]

    set: Any = _asked("set")
    add: Any = _asked("add")
    append = _asked("append")
    compare_set: Any = _asked("compare_set")
    check: Any = _asked("check")
    delete_key: Any = _asked("delete_key")
    num_keys: Any = _asked("num_keys")

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout)

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
