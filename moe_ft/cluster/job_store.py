"""The job's store where repairs are possible: in a process of its own, so that it outlives every rank.

The zygote of the node of rank 0 listens where rank 0 would listen otherwise, and forks that process. Each
start has a port and a store of its own. What ranks say to each other there about repairs is rounds.py; who is
let in, and how bytes travel, is store_server.py and store_client.py.
"""

import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from moe_ft import addresses
from moe_ft.cluster.link import START, Link, token_of
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.cluster.store_client import JobStore, ask_for_token
from moe_ft.cluster.store_server import MAX_STRANGERS, StoreServer
from moe_ft.errors import RepairError
from moe_ft.files.progress import awaiting_others
from moe_ft.processes import raise_descriptors
from moe_ft.saying import say

_PREFIX = "moe_ft"
_BACKLOG = 4096
_ANSWER_S = 30.0  # of a store that can be reached
_PATIENCE_S = 10.0  # before a line says what is waited for
_POLL_S = 0.05
# Connections: of its two threads, of its zygote for a replacement, and of the next process meanwhile.
_NUM_PER_RANK = 4
_NUM_OWN = 128
_MANY = 1 << 16  # open files, where that is allowed: an elastic job grows


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
    """Return a socket that listens at an address for a store, which torch would do on all interfaces.

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
    num_ranks = int(environment["WORLD_SIZE"])
    needed = _NUM_PER_RANK * num_ranks + MAX_STRANGERS + _NUM_OWN
    allowed = raise_descriptors(max(needed, _MANY))
    if allowed < needed:
        say(
            f"warning: the job's store needs {needed} open files for {num_ranks} ranks, and may have "
            f"{allowed} (ulimit -Hn): ranks may not get in. Raise the limit where the job is started"
        )
    # Ranks of torchrun cannot know the token in another way.
    num_seats = 0 if token_of(environment) else num_ranks
    server = StoreServer(token, _run(environment), num_seats=num_seats)
    server.start(listener)
    address = listener.getsockname()[:2]

    def open_start(number: int) -> SignedStore:
        of_start = {**environment, START: str(number)} if number else environment
        store = JobStore(address, _run(environment), token, _prefix(of_start))
        return SignedStore(store, lambda: token)

    if coordinate is not None:
        coordinate(open_start)
    while True:
        signal.pause()


def connect(environment: Mapping[str, str], link: Link, deadline_s: float) -> JobStore:
    """Return a connection of its own to the store of this start; the link learns the token if it has none.

    Args:
        deadline_s: for the node of rank 0 to import what ranks need, and to listen.

    Raises:
        RepairError: if nobody listens in time, or if it is the store of another job.
    """
    address, where, run = _address(environment), _where(environment), _run(environment)
    if environment.get("RANK") == "0" and not link.token:
        raise RepairError(
            f"the process that forks ranks could not listen at {where}, where the ranks are to meet"
        )
    waiting = f"waiting up to {deadline_s:.0f} s for the node of rank 0 to listen at {where}"
    try:
        wait_for_listener(address, deadline_s, lambda: say(f"{waiting}: it may still import"))
    except OSError as error:
        raise RepairError(
            f"nothing has listened at {where} within {deadline_s:.0f} s, where the node of rank "
            f"0 keeps the job's store ({error.strerror or error})"
        ) from error
    try:
        if not link.token:
            link.token = ask_for_token(address, run, int(environment["RANK"]))
        return JobStore(address, run, link.token, _prefix(environment))
    except OSError as error:
        raise RepairError(f"the store of this job does not answer at {where}: {error}") from error


def take_seat(store: Any, environment: Mapping[str, str]) -> None:
    """Be the only first process of a rank that uses a store; raise RepairError if another one has done so."""
    rank = environment["RANK"]
    if store.add(f"seat_{rank}", 1) != 1:
        raise RepairError(
            f"the store at {_where(environment)} has a rank {rank} already: it is of another job or another "
            "start"
        )


def _address(environment: Mapping[str, str]) -> tuple[str, int]:
    return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])


def _prefix(environment: Mapping[str, str]) -> str:
    return f"{_PREFIX}{environment.get(START, '')}"


def _where(environment: Mapping[str, str]) -> str:
    return "{}:{}".format(*_address(environment))


def _run(environment: Mapping[str, str]) -> str:
    return environment.get("TORCHELASTIC_RUN_ID", "")


@awaiting_others()
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
