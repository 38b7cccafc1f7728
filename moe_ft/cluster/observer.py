"""Watch of other nodes by the answers of their kernels.

A node whose processes are stopped or starved still acknowledges what it is sent: its kernel does that. A node
without power, or one that is cut off, does not. So an agent holds a connection to a few others (ring.py), and
asks its own kernel whether the last message there is acknowledged. It misses a node whose kernel has left a
message without an answer for the limit. Whether that node is lost is for the law. One whose processes stand
still is not: hangs are for its ranks.

What listens on each node is a server as that of the job's store, with no values: it lets in who knows the
token of the start, and nobody else. Used by the agent's thread alone.
"""

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from moe_ft.addresses import own_host
from moe_ft.cluster.job_store import listen_at
from moe_ft.cluster.store_client import JobStore
from moe_ft.cluster.store_server import StoreServer
from moe_ft.errors import RepairError
from moe_ft.saying import warn

LOOK_S = 0.1  # between two looks
_LONGEST_LOOK_S = 0.3
_AGAIN_S = 1.0  # after a connection that has failed
_LATE_S = 30.0  # until a line says that a node is not reached


def let_watch(host: str, run: str, token: str) -> int:
    """Let others watch this node until the process ends, and return the port; raises OSError."""
    listener = listen_at((host, 0))
    StoreServer(token, run).start(listener)
    return int(listener.getsockname()[1])


class Probe:
    """A connection to one node, made again when it ends."""

    def __init__(self, address: tuple[str, int], run: str, token: str) -> None:
        """Connect not yet."""
        self._address = address
        self._given = (run, token)
        self._connection: JobStore | None = None
        self._connecting: threading.Thread | None = None
        self._again_s = 0.0
        self._late_s = time.monotonic() + _LATE_S  # until the first connection
        self._is_closed = False

    def look(self) -> bool:
        """Return whether the node's kernel has acknowledged all; True if there is no connection."""
        if self._connection is not None:
            try:
                return self._connection.knock()
            except OSError:  # its agent has ended, and its kernel says so
                self._connection.close()
                self._connection = None
        now_s = time.monotonic()
        if now_s > self._late_s:
            self._late_s = float("inf")
            warn(
                "no connection to the agent at {}:{}: if the power of that node fails, only --lost-after "
                "shows it. Let nodes of the job connect to each other".format(*self._address)
            )
        is_connecting = self._connecting is not None and self._connecting.is_alive()
        if not is_connecting and now_s > self._again_s:
            self._again_s = now_s + _AGAIN_S
            # A host without power answers nothing: the thread may need the time of a connection.
            self._connecting = threading.Thread(
                target=self._connect, name="moe_ft-observer", daemon=True
            )
            self._connecting.start()
        return True

    def _connect(self) -> None:
        with suppress(OSError, RepairError):  # it is tried again
            self._connection = connection = JobStore(self._address, *self._given)
            self._late_s = float("inf")
            if self._is_closed:
                connection.close()

    def close(self) -> None:
        """End the connection."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()


class Observer:
    """Watches some nodes for one agent, and lets others watch its own."""

    def __init__(self, master: str, run: str, token: str, limit_s: float) -> None:
        """Watch nobody yet.

        Args:
            master: host of the job's store; this listens on the interface towards it.
            run: name of the job's run.
            token: secret of the start.
            limit_s: silence of a kernel after which this misses its node; 0 to watch nobody.
        """
        self._host = own_host(master)
        self._given = (run, token)
        self._limit_s = limit_s
        self._place: tuple[str, int] | tuple[()] = ()
        self._probes: dict[str, Probe] = {}  # by id of the node
        self._silent_s: dict[str, float] = {}
        self._looked_s = time.monotonic()
        self._missed: list[str] = []

    def open(self) -> None:
        """Let others watch this node."""
        if self._limit_s and sys.platform != "linux":
            self._limit_s = 0.0
            warn(
                "this system does not tell what the kernel of another node has acknowledged: only the "
                "silence of its agent shows that a node is lost (--lost-after)"
            )
        if self._limit_s:
            with suppress(OSError):  # of a name that leads nowhere: then nobody does
                self._place = self._host, let_watch(self._host, *self._given)

    def close(self) -> None:
        """Watch nobody."""
        for each in self._probes.values():
            each.close()

    def facts(self) -> dict[str, Any]:
        """Return where others watch this node, and which ones it misses."""
        return {"watch": self._place, "missed": self._missed}

    def learn(self, nodes: Sequence[tuple[str, str, int]]) -> None:
        """Watch these nodes from now on: ids, hosts and ports."""
        told = {id: (host, port) for id, host, port in nodes if self._limit_s}
        for id in self._probes.keys() - told.keys():
            self._probes.pop(id).close()
        for id in told.keys() - self._probes.keys():
            self._probes[id] = Probe(told[id], *self._given)

    def look(self) -> bool:
        """Look at all; return whether this misses other nodes than before."""
        now_s, known, before = time.monotonic(), self._silent_s, self._missed
        # A longer time between two looks says that this process did not run, and nothing about a node.
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        self._silent_s = {
            id: 0.0 if probe.look() else known.get(id, 0.0) + passed_s
            for id, probe in self._probes.items()
        }
        self._missed = [id for id, silent_s in self._silent_s.items() if silent_s > self._limit_s]
        return self._missed != before
