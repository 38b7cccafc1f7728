"""Meetings of the processes of a doctor: their place, and the values that they show each other there.

Places are torchrun's, SLURM's, or a process is alone. The store is torchrun's, or one that rank 0 opens at
MASTER_ADDR and MASTER_PORT. Training meets at the same address. A process that stays silent is given up.

Whoever reaches the store can write to it. Values are therefore signed with the token that the launch was
given (signed_store.py). Without one anybody can sign: then a lie may cost a wrong row, and nothing else.
"""

import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import msgspec

from moe_ft.cluster.signed_store import SignedStore
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.failure_domains import expand
from moe_ft.launches import launch_of, shares_store, slurms_variables

TOKEN_NAME = "MOE_FT_DOCTOR_TOKEN"
_LEAST_TOKEN = 16  # characters: the proofs in the store let strangers try tokens at leisure
_LEAST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that Linux gives to outgoing connections
_POLL_S = 0.05
_OPERATION_S = 10.0  # of one request to the store
_PREFIX = "moe_ft_doctor"
_NO_TOKEN = "none"  # that anybody knows


@dataclass(frozen=True, kw_only=True, slots=True)
class MeetingPlace:
    """A process and where its launch meets.

    Attributes:
        master: host and port where they meet.
        has_agent_store: whether the launcher listens there already.
        token: secret that all processes were given; empty if there is none.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master: tuple[str, int] = ("127.0.0.1", 0)
    has_agent_store: bool = False
    token: str = field(default="", repr=False)

    @property
    def is_alone(self) -> bool:
        """True if there is nobody to meet."""
        return self.world_size == 1


def find_place(environment: Mapping[str, str]) -> MeetingPlace:
    """Return the place that the launcher's variables give.

    Raises:
        ConfigError: if they say that there are several processes, and not where they meet; if the token is
            short; if torchrun has started doctor again.
    """
    environment = {**environment, **slurms_variables(environment)}
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, world_size, local = (_number(environment, name) for name in names)
    if world_size is None or world_size == 1:
        return MeetingPlace(master=(environment.get("MASTER_ADDR", "127.0.0.1"), 0))
    if rank is None or not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={environment.get('RANK', '')} must be a number below WORLD_SIZE={world_size}. Start "
            "doctor with torchrun or srun, which set both."
        )
    if count := launch_of(environment).start:
        # torchrun's store still has what the processes before have shown.
        raise ConfigError(
            f"TORCHELASTIC_RESTART_COUNT={count} must be 0: doctor has already run. Its table is above. "
            "Start it with torchrun --max-restarts 0, then it runs once."
        )
    token = environment.get(TOKEN_NAME, "")
    if 0 < len(token) < _LEAST_TOKEN:
        raise ConfigError(
            f"{TOKEN_NAME} has {len(token)} characters and must have at least {_LEAST_TOKEN}, or be unset. "
            "Set it to the same random value on all nodes, such as what `openssl rand -hex 16` prints."
        )
    return MeetingPlace(
        rank=rank,
        world_size=world_size,
        local_world_size=local or 1,
        master=_master(environment),
        has_agent_store=shares_store(environment),
        token=token,
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _master(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return where the processes meet: MASTER_ADDR and MASTER_PORT, else the first node of the SLURM step."""
    host, port = environment.get("MASTER_ADDR"), _number(environment, "MASTER_PORT")
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if not host and nodes:
        host = next(expand(nodes), nodes)  # such as gpu[003-007,9],login
    job = _number(environment, "SLURM_JOB_ID")
    if port is None and job is not None:
        port = _LEAST_PORT + job % _NUM_PORTS
    if not host or port is None:
        raise ConfigError(
            f"MASTER_ADDR={host or ''} and MASTER_PORT={port or ''} must say where the processes of doctor "
            "meet. Set both, or start it with torchrun or srun."
        )
    return host, port


class Meeting:
    """Values that the processes of a launch show each other. Used by one thread."""

    def __init__(self, place: MeetingPlace, deadline_s: float) -> None:
        """Connect.

        Args:
            deadline_s: of the monotonic clock.

        Raises:
            ConfigError: if the place has a name that leads nowhere.
            OSError: if rank 0 cannot listen at the place.
            RuntimeError: if nobody listens at the place in time.
        """
        self._rank = place.rank
        self._is_alone = place.is_alone
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


def _open_store(place: MeetingPlace, deadline_s: float) -> Any:
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
