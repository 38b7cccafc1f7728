"""The job's store: in a process of the agent of one node, so that it outlives every rank.

Agents and ranks connect to it. Each start of all ranks has keys of its own in it. What ranks write there
about repairs is rounds.py; who is let in, and how bytes travel, is store_server.py and store_client.py.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from moe_ft import addresses
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.cluster.store_client import JobStore
from moe_ft.cluster.store_server import MAX_STRANGERS, StoreServer
from moe_ft.errors import RepairError
from moe_ft.files.progress import awaiting_others
from moe_ft.processes import raise_descriptors
from moe_ft.saying import say, warn

_PREFIX = "moe_ft"
_BACKLOG = 4096
_ANSWER_S = 30.0  # of a store that can be reached
_PATIENCE_S = 10.0  # before a line says what is waited for
_POLL_S = 0.05
# Connections: of its two threads, of a replacement that joins, and of the next process meanwhile.
_NUM_PER_RANK = 4
_NUM_OWN = 128
_MANY = 1 << 16  # open files, where that is allowed: an elastic job grows


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
    run: str,
    token: str,
    num_ranks: int,
    coordinate: Callable[[Callable[[int], SignedStore]], NoReturn] | None = None,
) -> NoReturn:
    """Keep the store of a job until this process is killed.

    Args:
        run: name of the job's run.
        token: secret of the start of the agents.
        coordinate: decides about nodes, in this process; it is given what opens the keys of a start of all
            ranks by its number.
    """
    needed = _NUM_PER_RANK * num_ranks + MAX_STRANGERS + _NUM_OWN
    allowed = raise_descriptors(max(needed, _MANY))
    if allowed < needed:
        warn(
            f"the job's store needs {needed} open files for {num_ranks} ranks, and may have "
            f"{allowed} (ulimit -Hn): ranks may not get in. Raise the limit where the job is started"
        )
    StoreServer(token, run).start(listener)
    address = listener.getsockname()[:2]
    if coordinate is not None:
        coordinate(lambda start: SignedStore(_open(address, run, token, start), lambda: token))
    while True:
        signal.pause()


def connect(environment: Mapping[str, str], token: str, deadline_s: float) -> JobStore:
    """Return a rank's connection to the keys of its start, as `reach` does."""
    address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    start = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return reach(address, run, token, start, deadline_s)


def reach_own(assignment: Assignment, deadline_s: float) -> SignedStore:
    """Return a further connection of a rank to the keys of its start, as `reach` does."""
    run, token = os.environ.get("TORCHELASTIC_RUN_ID", ""), assignment.token
    store = reach(assignment.meet, run, token, assignment.start, deadline_s)
    return SignedStore(store, lambda: token)


def reach(
    address: tuple[str, int], run: str, token: str, start: int, deadline_s: float
) -> JobStore:
    """Return a connection to the keys of a start of all ranks.

    Args:
        deadline_s: for the node that keeps the store to listen.

    Raises:
        RepairError: if nobody listens in time, or if it is the store of another job.
    """
    where = f"{address[0]}:{address[1]}"
    waiting = (
        f"waiting up to {deadline_s:.0f} s for the node of the job's store to listen at {where}"
    )
    try:
        wait_for_listener(address, deadline_s, lambda: say(waiting))
    except OSError as error:
        raise RepairError(
            f"nothing has listened at {where} within {deadline_s:.0f} s, where a node keeps the job's store "
            f"({error.strerror or error})"
        ) from error
    try:
        return _open(address, run, token, start)
    except OSError as error:
        raise RepairError(f"the store of this job does not answer at {where}: {error}") from error


def _open(address: tuple[str, int], run: str, token: str, start: int) -> JobStore:
    return JobStore(address, run, token, f"{_PREFIX}{start}")


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
