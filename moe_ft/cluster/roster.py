"""Values of the store between the nodes of a job and their coordinator (coordinator.py).

`NodeSeat` is the node's side, `NodeRoster` that of the coordinator.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from moe_ft.cluster import ring
from moe_ft.cluster.membership import Lost, Node, Quiet
from moe_ft.cluster.signed_store import SignedStore, poll_s

# Beats that a lost node has missed: while others have lost connections (ranks wait 10 s for news then), in
# any other case, and while its kernel is silent, too.
_SUSPECTED_BEATS, _LOST_BEATS, _QUIET_BEATS = 8, 3, 2
# The word of a node counts that has missed fewer: they take less time than the silence of a kernel.
_HEARD_BEATS = 3
_LONGEST_LOOK_S = 1.0
PERIOD_S = 0.25  # between two beats of a node, and two looks at them
ARRIVED, LEAVING, SAVE, OVER = (f"nodes/{what}" for what in ("arrived", "leaving", "save", "over"))
_FACTS = ("room_bytes", "used_bytes", "unreached", "missed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Ranks that a node is to run, besides those that it has of the same start.

    Attributes:
        round: in which they join; 0 at the start.
        died_s: time since 1970 when their node was heard last; 0 at the start.
        lost_node: that had them before.
        start: for which all ranks end that run for an earlier one; 0 is the first.
        num_nodes: slots of that start.
        host: slot of the node whose devices the ranks share; None if they have devices of their own.
        ends: ranks that it is to end, as another node gets them in the next round.
    """

    ranks: tuple[int, ...] = ()
    round: int = 0
    died_s: float = 0.0
    lost_node: str = ""
    start: int = 0
    num_nodes: int = 0
    host: int | None = None
    ends: tuple[int, ...] = ()


class NodeSeat:
    """One node's view of the store, as long as it is not lost. Used by one thread."""

    def __init__(self, store: SignedStore, name: str, number: int, **facts: Any) -> None:
        """Register with the job.

        Args:
            number: among the nodes that were started; those that train come first.
            facts: attributes of `Node`, and its address for datagrams of others.
        """
        self._store = store
        self.id = secrets.token_hex(8)
        self._beats = self._num_taken = self._num_nodes = 0
        self._taken = set[Order]()
        self._has_left = False
        self._addresses: dict[str, tuple[str, int]] = {}
        store.append(ARRIVED, {"id": self.id, "name": name, "number": number, **facts})

    def beat(self, code: int | None, start: int = 0, **facts: Any) -> None:
        """Show that the node lives, and how its ranks have ended; None if some run, or there are none.

        Args:
            start: of these ranks.
            facts: attributes of `Node`, where they may have changed.
        """
        self._beats += 1
        self._store.set(of_node(self.id, "beats"), [self._beats, code, start, facts])

    def new_orders(self) -> list[Order]:
        """Return orders that were not returned before."""
        if self._store.length(key := of_node(self.id, "orders")) <= self._num_taken:
            return []
        found = self._store.values(key)
        self._num_taken = len(found)
        lists = ("ranks", "ends")
        orders = [Order(**each | {name: tuple(each[name]) for name in lists}) for each in found]
        new = [each for each in orders if each not in self._taken]  # whoever has said it again
        self._taken.update(new)
        return new

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Return the addresses of the nodes that have come, by id; of a name the last one counts."""
        if (num_nodes := self._store.length(ARRIVED)) == self._num_nodes:
            return self._addresses
        self._num_nodes = num_nodes
        found = {each["name"]: each for each in self._store.values(ARRIVED) if each.get("address")}
        self._addresses = {each["id"]: tuple(each["address"]) for each in found.values()}
        return self._addresses

    def watched(self) -> list[tuple[str, str, int]]:
        """Return the ids, hosts and ports of the nodes that this one is to watch."""
        return self._store.get(of_node(self.id, "watches")) or []

    def is_lost(self) -> bool:
        """Return whether the node was called lost: another one has its ranks, or will have them."""
        return self._store.get(of_node(self.id, "lost")) is not None

    def leave(self) -> None:
        """Say, once, that this node is told to end. Then it is lost, or all ranks are to save and end."""
        if not self._has_left:
            self._store.append(LEAVING, self.id)
            self._has_left = True

    def is_to_save(self) -> bool:
        """Return whether all ranks are to save their state and end."""
        return self._store.get(SAVE) is not None

    def over(self) -> tuple[int, str] | None:
        """Return the exit code of the job, and the reason if it failed; None as long as it runs."""
        found = self._store.get(OVER)
        return None if found is None else (found["code"], found["why"])


@dataclass(eq=False, slots=True)
class _Heard:
    """A node, with the time since 1970 of its last beat, and the seconds for which it was silent since.

    Attributes:
        place: host and port where others watch it; empty if they cannot.
        watches: what it was told to watch.
    """

    node: Node
    heard_s: float
    place: Collection[Any] = ()
    watches: Collection[Any] = ()
    beats: int = 0
    silent_s: float = 0.0


class NodeRoster:
    """Nodes that are there, as the coordinator hears them.

    Attributes:
        lost_s: time since 1970 when the last of those was heard that were struck last.
    """

    def __init__(self, store: SignedStore, lost_after_s: float, kernel_silence_s: float) -> None:
        """Know no node yet.

        Args:
            lost_after_s: silence of a node after which it is lost.
            kernel_silence_s: silence of a node after which others may say that it is; 0 if they never may.
        """
        self.lost_s = 0.0
        self._kernel_silence_s = kernel_silence_s
        self._store = store
        self._lost_after_s = lost_after_s
        self._num_arrived = 0
        self._heard: dict[str, _Heard] = {}
        self._arrived = set[str]()  # ids of all that ever were: each is a node once
        self._looked_s = time.monotonic()
        self._num_leaving = 0
        self._asked: dict[str, int] | None = None  # beats of all nodes when somebody asked for all

    def arrived(self) -> tuple[Node, ...]:
        """Return nodes that have registered and were not returned before."""
        if self._store.length(ARRIVED) <= self._num_arrived:
            return ()
        arrived = self._store.values(ARRIVED)
        self._num_arrived = len(arrived)
        for each in arrived:
            if each["id"] not in self._arrived and each["id"] not in self._heard:
                node = Node(id=each["id"], name=each["name"], number=each["number"])
                place = each.get("watch", ())
                self._heard[node.id] = _Heard(_with_facts(node, each), time.time(), place)
        self._tell_ring()
        new = [each.node for id, each in self._heard.items() if id not in self._arrived]
        self._arrived |= self._heard.keys()
        return tuple(new)

    def hear(
        self, start: int, is_suspected: Callable[[], bool]
    ) -> tuple[tuple[Node, ...], list[Lost | Quiet]]:
        """Hear all nodes; return those whose facts have changed, and events of those that are silent.

        Args:
            start: whose ranks count, by how they end.
            is_suspected: asked if a node is silent: whether ranks have lost connections.
        """
        now_s, changed = time.monotonic(), list[Node]()
        # A longer time between two looks says that this process did not run, and nothing about a node.
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        for id, each in self._heard.items():
            said = self._store.get(of_node(id, "beats"))
            beats, code, of_start, facts = said or (0, None, 0, {})
            if beats <= each.beats:
                each.silent_s += passed_s
                continue
            each.beats, each.silent_s, each.heard_s = beats, 0.0, time.time()
            code = code if of_start == start else None
            node = _with_facts(replace(each.node, code=code, missed=()), facts)
            if node != each.node:
                changed.append(node)
            each.node = node
        return tuple(changed), [*self._silences(is_suspected)]

    def _silences(self, is_suspected: Callable[[], bool]) -> Iterator[Lost | Quiet]:
        """Yield events of nodes that are silent while some of their ranks run, or if they have none."""
        silent_s = {id: each.silent_s for id, each in self._heard.items() if each.node.code is None}
        longest_s = max(silent_s.values(), default=0.0)
        beat_s = poll_s(
            8 * len(self._heard), PERIOD_S
        )  # nodes beat less often where there are many
        limit_s = max(self._lost_after_s, _LOST_BEATS * beat_s)
        suspected_s = min(limit_s, _SUSPECTED_BEATS * beat_s)
        if longest_s > suspected_s and is_suspected():
            limit_s = suspected_s
        if lost := [id for id, seconds in silent_s.items() if seconds > limit_s]:
            yield Lost(tuple(lost), f"silent for {silent_s[lost[0]]:.1f} s")
        quiet_s = max(self._kernel_silence_s, _QUIET_BEATS * beat_s)
        if longest_s > quiet_s and self._kernel_silence_s:
            quiet = {id: seconds for id, seconds in silent_s.items() if seconds > quiet_s}
            heard_s = _HEARD_BEATS * beat_s
            heard = (id for id, each in self._heard.items() if each.silent_s < heard_s)
            yield Quiet(quiet, frozenset(heard))

    def _tell_ring(self) -> None:
        """Tell nodes whom they are to watch, where that has changed."""
        for id, ids in ring.watched_by(self._heard).items():
            watches = [[each, *place] for each in ids if (place := self._heard[each].place)]
            if watches != self._heard[id].watches:
                self._heard[id].watches = watches
                self._store.set(of_node(id, "watches"), watches)

    def strike(self, ids: Collection[str]) -> str:
        """Call nodes lost, and hear them no more; return their names."""
        lost = [self._heard.pop(each) for each in ids]
        self.lost_s = max(each.heard_s for each in lost)
        for each in lost:
            self._store.set(of_node(each.node.id, "lost"), True)
        self._tell_ring()
        return ", ".join(each.node.name for each in lost)

    def begin_start(self) -> None:
        """Forget how the ranks of the start before have ended, and who was asked for."""
        self._asked = None
        for each in self._heard.values():
            each.node = replace(each.node, code=None)

    def told(self) -> tuple[str, ...]:
        """Return ids of nodes that are told to end, if there are more than before."""
        if (count := self._store.length(LEAVING)) <= self._num_leaving:
            return ()
        self._num_leaving = count
        return tuple(self._store.values(LEAVING))

    def ask_for_all(self) -> None:
        """Begin to look whether all nodes live whose ranks run."""
        self._asked = {id: each.beats for id, each in self._heard.items()}

    def has_heard_all(self) -> bool:
        """Return, once, that all of these have been heard twice since somebody asked."""
        if self._asked is None:
            return False
        has_heard = all(
            each.node.code is not None or each.beats > self._asked.get(id, 0) + 1
            for id, each in self._heard.items()
        )
        self._asked = None if has_heard else self._asked
        return has_heard


def _with_facts(node: Node, facts: dict[str, Any]) -> Node:
    known = {name: facts[name] for name in _FACTS if name in facts}
    known |= {name: tuple(known[name]) for name in ("unreached", "missed") if name in known}
    return replace(node, **known)


def of_node(node: str, what: str) -> str:
    """Return the key of something that one node says or is told."""
    return f"node_{node}/{what}"
