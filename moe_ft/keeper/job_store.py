"""The job's store where repairs are possible: in a process of its own, so that it outlives every rank.

The zygote of the node of rank 0 listens where rank 0 would listen otherwise, and forks that process. Each
start has a port and a store of its own. What ranks say to each other there about repairs is rounds.py.
"""

import signal
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore

from moe_ft.engine.links import addresses
from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import RepairError
from moe_ft.keeper.link import START, Link, token_of
from moe_ft.saying import say

_PREFIX = "moe_ft"
_BACKLOG = 4096
_ANSWER_S = 30.0  # of a store that can be reached
_PATIENCE_S = 10.0  # before a line says what is waited for
_POLL_S = 0.05
_SHOWN = 100  # characters of the name of another job


def is_shared(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher keeps the store itself."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def listen(environment: Mapping[str, str]) -> socket.socket:
    """Return a socket that listens at MASTER_PORT, on the interface of MASTER_ADDR (addresses.py).

    Raises:
        OSError: if somebody else listens there.
    """
    has_one_node = environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"]
    is_alone = (
        has_one_node and "MOE_FT_KEEP_STORE_ON" not in environment
    )  # a spare comes from elsewhere
    return listen_at(_address(environment), is_alone=is_alone)


def listen_at(address: tuple[str, int], *, is_alone: bool = False) -> socket.socket:
    """Return a socket that listens at an address for a store of torch, which would do so on all interfaces.

    Raises OSError if somebody else listens there.
    """
    found, *others = addresses.listen(*address, is_alone=is_alone)
    for each in others:  # torch takes one
        each.close()
    found.listen(_BACKLOG)
    return found


def serve(
    listener: socket.socket,
    environment: Mapping[str, str],
    token: str,
    coordinate: Callable[[Callable[[int], SignedStore]], NoReturn] | None = None,
) -> NoReturn:
    """Keep the store of a start, in the environment of rank 0, until this process is killed.

    Args:
        coordinate: decides about nodes, in this process; it is given what opens the store of the start with
            a number, 0 for the one of the caller.
    """
    tcp = TCPStore(
        *_address(environment),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )

    def open_start(number: int) -> SignedStore:
        of_start = {**environment, START: str(number)} if number else environment
        own_token = token_of(of_start) if number else token
        store = PrefixStore(_prefix(of_start), tcp)
        signed = SignedStore(store, lambda: own_token)
        signed.set("owner", _run(environment))
        store.set("run", _run(environment))
        return signed

    if coordinate is not None:
        coordinate(open_start)
    open_start(0)
    while True:
        signal.pause()


def connect(environment: Mapping[str, str], link: Link, deadline_s: float) -> Any:
    """Return a connection of its own to the store of this start.

    Args:
        deadline_s: for the node of rank 0 to import what ranks need, and to listen.

    Raises:
        RepairError: if nobody listens in time, or if it is the store of another job.
    """
    (host, port), where = _address(environment), _where(environment)
    if environment.get("RANK") == "0" and not link.token:
        raise RepairError(
            f"the process that forks ranks could not listen at {where}, where the ranks are to meet"
        )
    waiting = f"waiting up to {deadline_s:.0f} s for the node of rank 0 to listen at {where}"
    try:
        wait_for_listener((host, port), deadline_s, lambda: say(f"{waiting}: it may still import"))
    except OSError as error:
        raise RepairError(
            f"nothing has listened at {where} within {deadline_s:.0f} s, where the node of rank "
            f"0 keeps the job's store ({error.strerror or error})"
        ) from error
    try:
        tcp = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_ANSWER_S))
        store = PrefixStore(_prefix(environment), tcp)
        run = store.get("run")
    except RuntimeError as error:
        raise RepairError(f"the store of this job does not answer at {where}: {error}") from error
    if run != _run(environment).encode():
        theirs = run[:_SHOWN].decode(errors="replace")
        raise RepairError(
            f"the store at {where} is of the job {theirs!r}, and this one is {_run(environment)!r} "
            "(torchrun --rdzv-id): it had taken the port before"
        )
    if link.token:
        check_owner(store, environment, link.token)
    return store


def take_seat(store: Any, environment: Mapping[str, str]) -> None:
    """Be the only first process of a rank that uses a store; raise RepairError if another one has done so."""
    rank = environment["RANK"]
    if store.add(f"seat_{rank}", 1) != 1:
        raise RepairError(
            f"the store at {_where(environment)} has a rank {rank} already: it is of another job or another "
            "start"
        )


def check_owner(store: Any, environment: Mapping[str, str], token: str) -> None:
    """Raise RepairError unless the store is that of the start with this token."""
    if SignedStore(store, lambda: token).get("owner") != _run(environment):
        raise RepairError(
            f"the store at {_where(environment)} is not the one of this start: another job has taken the port"
        )


def _address(environment: Mapping[str, str]) -> tuple[str, int]:
    return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])


def _prefix(environment: Mapping[str, str]) -> str:
    return f"{_PREFIX}{environment.get(START, '')}"


def _where(environment: Mapping[str, str]) -> str:
    return "{}:{}".format(*_address(environment))


def _run(environment: Mapping[str, str]) -> str:
    return environment.get("TORCHELASTIC_RUN_ID", "")


def wait_for_listener(
    address: tuple[str, int], deadline_s: float, say_waiting: Callable[[], None] = lambda: None
) -> None:
    """Return when somebody listens. torch's own wait ends up to twice as late as it is told to.

    Args:
        say_waiting: is called once if that takes long.

    Raises:
        OSError: why it is not reached, after so many seconds.
    """
    begin_s, has_said = time.monotonic(), False
    while True:
        left_s = begin_s + deadline_s - time.monotonic()
        try:
            socket.create_connection(address, timeout=max(_POLL_S, min(left_s, _ANSWER_S))).close()
            return
        except OSError:
            if left_s <= 0:
                raise
        if deadline_s - left_s > _PATIENCE_S and not has_said:
            has_said = True
            say_waiting()
        time.sleep(_POLL_S)
