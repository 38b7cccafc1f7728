"""Exchange of values between the processes of a doctor, with a deadline for those that stay silent.

torchrun's store, or one that rank 0 opens at MASTER_ADDR and MASTER_PORT. Training meets at the same address.
"""

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from moe_ft.doctor.place import Place
from moe_ft.errors import ConfigError

_POLL_S = 0.05
_OPERATION_S = 10.0  # of one request to the store


class Meeting(Protocol):
    """Values that the processes of a launch show each other."""

    def show(self, name: str, value: Any) -> None:
        """Show a value to all others, under a name that is used once."""
        ...

    def collect(self, name: str, ranks: Iterable[int], deadline_s: float) -> dict[int, Any]:
        """Return what these ranks have shown by a time of the monotonic clock, by rank."""
        ...


class OwnMeeting:
    """A process that is alone."""

    def __init__(self) -> None:
        self._shown: dict[str, Any] = {}

    def show(self, name: str, value: Any) -> None:
        """Keep a value."""
        self._shown[name] = msgspec.json.decode(msgspec.json.encode(value))

    def collect(self, name: str, ranks: Iterable[int], deadline_s: float) -> dict[int, Any]:
        """Return the own value."""
        return {0: self._shown[name]} if name in self._shown else {}


class StoreMeeting:
    """Several processes that meet in a TCPStore of torch. Used by one thread."""

    def __init__(self, place: Place, deadline_s: float) -> None:
        """Connect.

        Raises:
            ConfigError: if the place has a name that leads nowhere.
            RuntimeError: if nobody listens at the place by a time of the monotonic clock.
        """
        _check_host(place.master[0])
        is_master = place.rank == 0 and not place.has_agent_store
        if not is_master:
            _wait_for_listener(place.master, deadline_s)
        import torch.distributed as dist  # only here: commands start without torch

        self._rank = place.rank
        self._prefix = f"moe_ft_doctor/{place.attempt}"
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but in no __all__
            *place.master,
            is_master=is_master,
            timeout=timedelta(seconds=max(1.0, deadline_s - time.monotonic())),
            wait_for_workers=False,
        )
        self._store.set_timeout(timedelta(seconds=_OPERATION_S))

    def show(self, name: str, value: Any) -> None:
        """Write a value to the store; raises RuntimeError if it does not answer."""
        self._store.set(self._key(name, self._rank), msgspec.json.encode(value).decode())

    def collect(self, name: str, ranks: Iterable[int], deadline_s: float) -> dict[int, Any]:
        """Read values from the store; raises RuntimeError if it does not answer."""
        found: dict[int, Any] = {}
        missing = list(ranks)
        while True:
            there = [rank for rank in missing if self._store.check([self._key(name, rank)])]
            for rank in there:
                found[rank] = msgspec.json.decode(self._store.get(self._key(name, rank)))
            missing = [rank for rank in missing if rank not in found]
            if not missing or time.monotonic() > deadline_s:
                return found
            time.sleep(_POLL_S)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"


def _wait_for_listener(address: tuple[str, int], deadline_s: float) -> None:
    """Return when someone listens.

    The store's own retries end up to twice as late as they are told to.

    Raises:
        RuntimeError: if nobody does in time.
    """
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            socket.create_connection(address, timeout=max(left_s, _POLL_S)).close()
            return
        except OSError as error:
            if left_s <= 0:
                raise RuntimeError(f"nobody listens there ({error.strerror or error})") from error
        time.sleep(_POLL_S)


def _check_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        raise ConfigError(
            f"MASTER_ADDR={host} must be a host that this node knows ({error.strerror}). Set it to the "
            "address of the node of rank 0. Without it doctor takes the first name of SLURM's list of nodes, "
            "which need not be a host name."
        ) from error
