"""Exchange of values between the processes of a doctor, with a deadline for those that stay silent.

torchrun's store, or one that rank 0 opens at MASTER_ADDR and MASTER_PORT. Training meets at the same address.

Whoever reaches the store can write to it. Values are therefore signed with the token that the launch was
given (signed_store.py). Without one anybody can sign: then a lie may cost a wrong row, and nothing else.
"""

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn

import msgspec

from moe_ft.cluster.signed_store import SignedStore
from moe_ft.doctor.place import TOKEN_NAME, Place
from moe_ft.errors import ConfigError, CorruptStateError

_POLL_S = 0.05
_OPERATION_S = 10.0  # of one request to the store
_PREFIX = "moe_ft_doctor"
_NO_TOKEN = "none"  # that anybody knows


class Meeting:
    """Values that the processes of a launch show each other. Used by one thread."""

    def __init__(self, place: Place, deadline_s: float) -> None:
        """Connect.

        Args:
            deadline_s: of the monotonic clock.

        Raises:
            ConfigError: if the place has a name that leads nowhere.
            OSError: if rank 0 cannot listen at the place.
            RuntimeError: if nobody listens at the place in time.
        """
        self._rank, self._is_alone = place.rank, place.is_alone
        store = _OwnStore() if place.is_alone else _open_store(place, deadline_s)
        self._store = SignedStore(store, lambda: place.token or _NO_TOKEN, _refuse)

    def show(self, name: str, value: Any) -> None:
        """Show a value to all others, under a name that is used once.

        Raises:
            RuntimeError: if the store does not answer.
        """
        # JSON in JSON: what msgspec writes, its decoders check.
        self._store.set(_key(name, self._rank), msgspec.json.encode(value).decode())

    def collect[T](
        self, name: str, ranks: Iterable[int], deadline_s: float, decoder: msgspec.json.Decoder[T]
    ) -> dict[int, T]:
        """Return what these ranks have shown by a time of the monotonic clock, by rank.

        Raises:
            CorruptStateError: if a value is not of this launch.
            RuntimeError: if the store does not answer.
        """
        found: dict[int, T] = {}
        missing = list(ranks)
        while True:
            for rank in missing:
                if (value := self._read(_key(name, rank), decoder)) is not None:
                    found[rank] = value
            missing = [rank for rank in missing if rank not in found]
            if not missing or self._is_alone or time.monotonic() > deadline_s:
                return found
            time.sleep(_POLL_S)

    def _read[T](self, key: str, decoder: msgspec.json.Decoder[T]) -> T | None:
        try:
            content = self._store.get(key)
            return None if content is None else decoder.decode(content)
        except (ValueError, RecursionError, TypeError) as error:
            raise CorruptStateError(f"'{key}' is not a value that doctor wrote: {error}") from error


def _refuse(key: str, reason: str) -> NoReturn:
    raise CorruptStateError(f"'{key}' has no proof of this process's {TOKEN_NAME}")


def _key(name: str, rank: int) -> str:
    return f"{_PREFIX}/{name}/{rank}"


class _OwnStore(dict[str, str]):
    """The store of a process that is alone, which need not import torch."""

    set = dict.__setitem__

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Return a value, or what was expected, as torch does."""
        return self.get(key, expected).encode()


def _open_store(place: Place, deadline_s: float) -> Any:
    host, port = place.master
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        raise ConfigError(
            f"MASTER_ADDR={host} must be a host that this node knows ({error.strerror}). Set it to the "
            "address of the node of rank 0. Without it doctor takes the first name of SLURM's list of nodes, "
            "which need not be a host name."
        ) from error
    # Only here: commands start without torch.
    from torch.distributed import TCPStore

    from moe_ft.cluster import job_store

    is_master = place.rank == 0 and not place.has_agent_store
    if not is_master:
        try:
            job_store.wait_for_listener(place.master, deadline_s - time.monotonic())
        except OSError as error:
            raise RuntimeError(f"nothing listens there ({error.strerror or error})") from error
    store = TCPStore(
        host,
        port,
        is_master=is_master,
        master_listen_fd=job_store.listen_at(place.master).detach() if is_master else None,
        timeout=timedelta(seconds=max(1.0, deadline_s - time.monotonic())),
        wait_for_workers=False,
    )
    store.set_timeout(timedelta(seconds=_OPERATION_S))
    return store
