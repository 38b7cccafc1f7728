"""Facts of a node that its own process finds out: its memory, and other nodes that it does not reach.

The coordinator hears every node, and cannot see that two of them do not reach each other: their
ranks would wait for each other until the groups' timeout. So nodes send each other datagrams. One says
whether its sender hears the receiver, so that both ends learn of a link that carries one direction alone. It
is not signed: with the id of a node, which is in the store, a stranger can make a dead link look alive.

A node sends at most MOST_SENT datagrams with each beat, to all others in turn: 2,048 nodes, which beat every
3.3 s, take 105 s for it. Every RENEWAL_BEATS beats it reads the list of them, if that has grown.
"""

import math
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from moe_ft.addresses import own_host
from moe_ft.free_memory import available_bytes, children_of, private_bytes

MOST_SENT, RENEWAL_BEATS = 64, 8
_MOST_HEARD, _MOST_SAID = 1024, 8  # with each beat
_MOST_BYTES = 64  # of a datagram
_LONGEST_LOOK_S = 1.0
_TURNS = 3  # without a datagram, until a link counts as dead


class NodeMemory(Protocol):
    """Memory that the ranks of a node use for states; calls may raise OSError."""

    def used_bytes(self) -> int:
        """Return the bytes that ranks have there."""

    def room_bytes(self) -> int:
        """Return the bytes that are free for ranks, or that they have already."""

    def remove_unused(self) -> None:
        """Remove what is left there, unless a process of the job is alive."""


class OwnNode:
    """The node of this process. Used by one thread at a time."""

    def __init__(
        self, master: str, memory: NodeMemory | None, period_s: float, limit_s: float
    ) -> None:
        """Hear nobody yet.

        Args:
            master: host of the job's store.
            memory: of the ranks; None if nothing is known about it.
            period_s: between two beats.
            limit_s: silence of a node after which it is lost.
        """
        self._master = master
        self._memory = memory
        self._period_s = period_s
        self._limit_s = limit_s
        self._address: Sequence[Any] = ()  # for datagrams of others
        self._id = ""
        self._addresses = dict[str, tuple[str, int]]()
        self._looked_s = time.monotonic()
        self._watched_s = 0.0
        # By node, when it was heard last, and when it said last that it hears this one.
        self._heard_s = dict[str, float]()
        self._reached_s = dict[str, float]()
        self._num_beats = self._next = 0

    def open(self) -> None:
        """Listen on the interface towards the job's master."""
        with suppress(OSError):  # of a name that leads nowhere: then it has no address
            found = socket.getaddrinfo(own_host(self._master), 0, type=socket.SOCK_DGRAM)
            family, _, _, _, place = found[0]
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._socket.bind(place)
            self._address = self._socket.getsockname()[:2]

    def close(self) -> None:
        """Listen no more."""
        if self._address:
            self._socket.close()

    def remove_memory(self) -> None:
        """Remove what is left of ranks that this node once had; the job is over, and it has none."""
        if self._memory is not None:
            self._memory.remove_unused()

    def facts(self, *, has_ranks: bool, server: int = 0) -> dict[str, Any]:
        """Return attributes of `Node`, with each beat; send to others, and hear them.

        Args:
            server: process that has forked its ranks; 0 for none. Further ranks would take as much memory.
        """
        found: dict[str, Any] = {"address": self._address, "unreached": self._look()}
        with suppress(OSError):  # the memory is being made, or removed
            if self._memory is not None:
                used = self._memory.used_bytes() if has_ranks else 0
                room = self._memory.room_bytes()
                if has_ranks and server:
                    own = private_bytes(children_of(server))
                    room = min(room, used + max(0, available_bytes() - own))
                found |= {"used_bytes": used, "room_bytes": room}
        return found

    def is_due(self) -> bool:
        """Return, with each beat, whether to read the list of nodes."""
        self._num_beats += 1
        return self._num_beats % RENEWAL_BEATS == 1

    def learn(self, own: str, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Send to these nodes from now on; `own` is the id of this one."""
        self._id = own
        self._addresses = {each: place for each, place in addresses.items() if each != own}

    def _look(self) -> list[str]:
        """Return nodes that were reached before, and are not any more."""
        if not self._address:
            return []
        # A longer time between two looks says that this process did not look, and nothing about a node.
        passed_s = min(time.monotonic() - self._looked_s, self._period_s + _LONGEST_LOOK_S)
        self._looked_s = time.monotonic()
        self._watched_s += passed_s
        now_s, nodes = self._watched_s, [*self._addresses]
        self._receive(now_s)
        turn_s = self._period_s * math.ceil(len(nodes) / MOST_SENT)
        limit_s = max(self._limit_s, _TURNS * turn_s)
        for each in (nodes * 2)[self._next :][: min(MOST_SENT, len(nodes))]:
            is_heard = now_s - self._heard_s.get(each, -math.inf) < limit_s
            with suppress(OSError):  # there is no way now
                self._socket.sendto(f"{self._id} {is_heard:d}".encode(), self._addresses[each])
        self._next = (self._next + MOST_SENT) % max(1, len(nodes))
        dead = [each for each in nodes if now_s - self._reached_s.get(each, math.inf) > limit_s]
        return sorted(dead, key=lambda each: -self._reached_s[each])[:_MOST_SAID]

    def _receive(self, now_s: float) -> None:
        with suppress(OSError):  # no more is there
            for _ in range(_MOST_HEARD):
                node, _, is_heard = self._socket.recv(_MOST_BYTES).decode("latin-1").partition(" ")
                if node in self._addresses:
                    self._heard_s[node] = now_s
                    if is_heard == "1":
                        self._reached_s[node] = now_s
