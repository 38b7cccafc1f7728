"""Exchange of values between the processes of a doctor, with a deadline for those that stay silent.

torchrun's store, or one that rank 0 opens at MASTER_ADDR and MASTER_PORT. Training meets at the same address.

Whoever reaches the store can write to it. Values are therefore signed with the token that the launch was
given (signed_store.py). Without one anybody can sign: then a lie may cost a wrong row, and nothing else.
"""

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import msgspec

from moe_ft.doctor.place import TOKEN_NAME, Place
from moe_ft.engine.links.addresses import listen
from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import ConfigError, CorruptStateError

_POLL_S = 0.05
_OPERATION_S = 10.0  # of one request to the store
_PREFIX = "moe_ft_doctor"
_NO_TOKEN = "none"  # that anybody knows


class Meeting(Protocol):
    """Values that the processes of a launch show each other."""

    def show(self, name: str, value: Any) -> None:
        """Show a value to all others, under a name that is used once."""
        ...

    def collect[T](
        self, name: str, ranks: Iterable[int], deadline_s: float, decoder: msgspec.json.Decoder[T]
    ) -> dict[int, T]:
        """Return what these ranks have shown by a time of the monotonic clock, by rank.

        Raises:
            CorruptStateError: if a value is not of this launch.
        """
        ...


class OwnMeeting:
    """A process that is alone."""

    def __init__(self) -> None:
        self._shown: dict[str, bytes] = {}

    def show(self, name: str, value: Any) -> None:
        """Keep a value."""
        self._shown[name] = msgspec.json.encode(value)

    def collect[T](
        self, name: str, ranks: Iterable[int], deadline_s: float, decoder: msgspec.json.Decoder[T]
    ) -> dict[int, T]:
        """Return the own value."""
        return {0: decoder.decode(self._shown[name])} if name in self._shown else {}


class StoreMeeting:
    """Several processes that meet in a TCPStore of torch. Used by one thread."""

    def __init__(self, place: Place, deadline_s: float) -> None:
        """Connect.

        Raises:
            ConfigError: if the place has a name that leads nowhere.
            OSError: if rank 0 cannot listen at the place.
            RuntimeError: if nobody listens at the place by a time of the monotonic clock.
        """
        _check_host(place.master[0])
        is_master = place.rank == 0 and not place.has_agent_store
        if not is_master:
            _wait_for_listener(place.master, deadline_s)
        import torch.distributed as dist  # only here: commands start without torch

        self._rank = place.rank
        # torch would listen on all interfaces.
        listener = _listen(place.master) if is_master else None
        store = dist.TCPStore(
            *place.master,
            is_master=is_master,
            master_listen_fd=listener,
            timeout=timedelta(seconds=max(1.0, deadline_s - time.monotonic())),
            wait_for_workers=False,
        )
        store.set_timeout(timedelta(seconds=_OPERATION_S))
        self._store = SignedStore(store, lambda: place.token or _NO_TOKEN, _refuse)

    def show(self, name: str, value: Any) -> None:
        """Write a value to the store; raises RuntimeError if it does not answer."""
        # JSON in JSON: what msgspec writes, its decoders check.
        self._store.set(_key(name, self._rank), msgspec.json.encode(value).decode())

    def collect[T](
        self, name: str, ranks: Iterable[int], deadline_s: float, decoder: msgspec.json.Decoder[T]
    ) -> dict[int, T]:
        """Read values from the store; raises RuntimeError if it does not answer."""
        found: dict[int, T] = {}
        missing = list(ranks)
        while True:
            for rank in missing:
                if (value := self._read(_key(name, rank), decoder)) is not None:
                    found[rank] = value
            missing = [rank for rank in missing if rank not in found]
            if not missing or time.monotonic() > deadline_s:
                return found
            time.sleep(_POLL_S)

    def _read[T](self, key: str, decoder: msgspec.json.Decoder[T]) -> T | None:
        """Return a value, None if it is not there; raise CorruptStateError if it is of another launch."""
        try:
            content = self._store.get(key)
            return None if content is None else decoder.decode(content)
        except (ValueError, RecursionError, TypeError) as error:
            raise CorruptStateError(f"'{key}' is no value of doctor: {error}") from error


def _refuse(key: str, reason: str) -> NoReturn:
    raise CorruptStateError(f"'{key}' has no proof of this process's {TOKEN_NAME}")


def _key(name: str, rank: int) -> str:
    return f"{_PREFIX}/{name}/{rank}"


def _listen(address: tuple[str, int]) -> int:
    """Return the descriptor of a socket that listens there; clients try all addresses of a name."""
    first, *others = listen(*address)
    for each in others:
        each.close()
    return first.detach()


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
