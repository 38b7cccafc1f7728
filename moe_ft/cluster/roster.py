"""Words between the nodes of a job and their coordinator (nodes.py), and who has which ranks."""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ft.cluster.protocol import say
from moe_ft.cluster.rounds import Rounds, Stages
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.config.fields import size_text
from moe_ft.files.private_files import replace_file

# Silence of a node while others have lost connections: eight beats. Ranks wait 10 s for news then.
_SUSPECTED_S = 2.0
_LONGEST_LOOK_S = 1.0
_AGAIN_S = 60.0  # until peers that play roles are interrupted again by ranks that come back
BUILT_S = 150.0  # for ranks that come back: the others wait for them 180 s (repair/meet.py)
_AGAIN_AFTER_LATE_S = 600.0  # until they are asked again if they were not built by then
GATHER_S = 3.0  # for all nodes to be told to end that are
PERIOD_S = 0.25  # between two beats of a node, and two looks at them
ARRIVED, LEAVING, SAVE, OVER = (f"nodes/{what}" for what in ("arrived", "leaving", "save", "over"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Ranks that a node is to run.

    Attributes:
        round: in which they join; 0 at the start.
        died_s: time since 1970 when their node was heard last; 0 at the start.
        lost_node: that had them before.
        start: for which all ranks end that run for an earlier one; 0 is the first.
        num_nodes: on which ranks of that start are.
    """

    ranks: tuple[int, ...]
    round: int = 0
    died_s: float = 0.0
    lost_node: str = ""
    start: int = 0
    num_nodes: int = 0


class NodeSeat:
    """One node's view of the store, as long as it is not lost. Used by one thread."""

    def __init__(self, store: SignedStore, name: str, number: int, **facts: Any) -> None:
        """Come to the job.

        Args:
            number: among the nodes that were started; those that train come first.
            facts: attributes of `HeardNode`.
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
            facts: attributes of `HeardNode`, where they may have changed.
        """
        self._beats += 1
        self._store.set(of_node(self.id, "beats"), [self._beats, code, start, facts])

    def new_orders(self) -> list[Order]:
        """Return orders that were not returned before."""
        if self._store.length(key := of_node(self.id, "orders")) <= self._num_taken:
            return []
        found = self._store.values(key)
        self._num_taken = len(found)
        orders = [Order(**{**each, "ranks": tuple(each["ranks"])}) for each in found]
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


@dataclass(eq=False, kw_only=True, slots=True)
class HeardNode:
    """A node that is there.

    Attributes:
        number: with which it came.
        slot: whose ranks it has, by the number of the node that had them first; None for a spare.
        silent_s: for which the coordinator has watched it be silent.
        heard_s: time since 1970 of its last beat.
        room_bytes, used_bytes: for the memory of ranks, and by those that it has, as far as it is known.
        address: for datagrams; empty if it has none.
        unreached: ids of nodes that it has reached, and does not any more.
        is_told: whether it was said that it stays nevertheless.
    """

    id: str
    name: str
    number: int
    slot: int | None = None
    beats: int = 0
    silent_s: float = 0.0
    heard_s: float = 0.0
    code: int | None = None
    room_bytes: float = math.inf
    used_bytes: int = 0
    address: Sequence[Any] = ()
    unreached: Sequence[str] = ()
    is_told: bool = False


class Roster:
    """Nodes that are there, as the coordinator hears them.

    Attributes:
        nodes: these, in the order in which they came, without those that were lost.
    """

    def __init__(self, store: SignedStore, lost_after_s: float) -> None:
        """Know no node yet.

        Args:
            lost_after_s: silence of a node after which it is lost.
        """
        self.nodes: list[HeardNode] = []
        self._store, self._lost_after_s, self._num_arrived = store, lost_after_s, 0
        self._arrived = set[str]()  # ids of all that ever were: each is a node once
        self._looked_s = time.monotonic()
        self._num_leaving = 0
        # When the first node was told to end of those that nothing has been decided about.
        self._leave_s: float | None = None
        self._failed: dict[str, int] | None = None  # beats of all nodes when some rank had failed

    def arrived(self) -> list[HeardNode]:
        """Return nodes that have come and were not returned before."""
        if self._store.length(ARRIVED) <= self._num_arrived:
            return []
        arrived = self._store.values(ARRIVED)
        by_id = {each["id"]: each for each in arrived if each["id"] not in self._arrived}
        new = [HeardNode(**each, heard_s=time.time()) for each in by_id.values()]
        self.nodes += new
        self._arrived |= by_id.keys()
        self._num_arrived = len(arrived)
        return new

    def hear(self, start: int, is_suspected: Callable[[], bool]) -> list[HeardNode]:
        """Hear all nodes, and return those that are lost.

        Args:
            start: whose ranks count, by how they end.
            is_suspected: asked if a node is silent: whether ranks have lost connections.
        """
        now_s, limit_s = time.monotonic(), self._lost_after_s
        # A longer time between two looks says that this process did not run, and nothing about a node.
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        if any(each.silent_s > _SUSPECTED_S for each in self.nodes) and is_suspected():
            limit_s = min(limit_s, _SUSPECTED_S)
        lost = []
        for node in self.nodes:
            said = self._store.get(of_node(node.id, "beats"))
            beats, code, of_start, facts = said or (0, None, 0, {})
            if beats > node.beats:
                for name, value in facts.items():
                    setattr(node, name, value)
                node.code = code if of_start == start else None
                node.beats, node.silent_s, node.heard_s = beats, 0.0, time.time()
            else:
                node.silent_s += passed_s
            if node.code is None and node.silent_s > limit_s:
                lost.append(node)
        return lost

    def strike(self, lost: Sequence[HeardNode]) -> None:
        """Call nodes lost, and hear them no more."""
        for each in lost:
            self.nodes.remove(each)
            self._store.set(of_node(each.id, "lost"), True)

    def spare_for(self, slot: int) -> HeardNode:
        """Return a spare: the one that came with this number, or else the first."""
        return next((each for each in self.spares() if each.number == slot), self.spares()[0])

    def spares(self) -> list[HeardNode]:
        """Return the nodes without ranks that have as much room as any other node uses."""
        needed = self.needed_bytes
        return [each for each in self.nodes if each.slot is None and each.room_bytes >= needed]

    def num_free(self, open_slots: Collection[int]) -> int:
        """Return how many spares are left once some have the slots that wait for one; less than 0 if few."""
        return len(self.spares()) - len(open_slots)

    @property
    def needed_bytes(self) -> int:
        """The bytes that the ranks of a node use, at most; 0 before they use any."""
        return max((each.used_bytes for each in self.nodes if each.slot is not None), default=0)

    def room_of(self, node: HeardNode) -> str:
        """Return words on the room of a node; none if that is not known."""
        if node.room_bytes == math.inf:
            return ""
        of = f" of {size_text(needed)}" if (needed := self.needed_bytes) else ""
        return f" (has room for {size_text(int(node.room_bytes))}{of})"

    def small(self) -> str:
        """Return words on nodes without ranks that are no spares for lack of room."""
        spares = self.spares()
        small = [each for each in self.nodes if each.slot is None and each not in spares]
        return "".join(f"; node {each.name}{self.room_of(each)} is too small" for each in small)

    def dead_link(self, own_number: int) -> tuple[HeardNode, str] | None:
        """Return a node with ranks that does not reach another one, as both say, and the words for that.

        Of the two it is not the node of the store, and else the one with more dead links.
        """
        ids = {each.id: each for each in self.nodes if each.slot is not None and each.code is None}
        pairs = [(one, ids.get(other)) for one in ids.values() for other in one.unreached]
        links = [(one, other) for one, other in pairs if other and one.id in other.unreached]
        num_dead = Counter(one.id for one, _ in links)
        if not links:
            return None
        one, other = max(links, key=lambda link: (link[0].slot != own_number, num_dead[link[0].id]))
        return one, f"it does not reach node {other.name}, and both reach the job's store"

    @property
    def is_leaving(self) -> bool:
        """Return whether a node is told to end about which nothing has been decided."""
        return self._leave_s is not None

    def told_to_end(self) -> list[HeardNode] | None:
        """Return the nodes that are told to end, once all had time to say it; None if none is new."""
        if (count := self._store.length(LEAVING)) > self._num_leaving and self._leave_s is None:
            self._leave_s = time.monotonic()
        if self._leave_s is None or time.monotonic() - self._leave_s < GATHER_S:
            return None
        self._leave_s, self._num_leaving = None, count
        told = set(self._store.values(LEAVING))
        return [each for each in self.nodes if each.id in told]

    def has_heard_all(self) -> bool:
        """Return whether all nodes whose ranks run live since this was asked first in this start."""
        if self._failed is None:
            self._failed = {each.id: each.beats for each in self.nodes}
        return all(
            each.code is not None or each.beats > self._failed.get(each.id, 0) + 1
            for each in self.nodes
        )

    def begin_start(self) -> None:
        """Forget what was asked in the start before."""
        self._failed = None


class Slots:
    """Names of the nodes that have ranks, by slot, and those of the job's last start.

    A file has the exit code of the job, "-" before, and in the next lines these names. Nodes that it names
    get the same ranks again: their memory has their state.
    """

    def __init__(
        self, num_nodes: int, ranks_per_node: int, own_number: int, status: Path | None
    ) -> None:
        self._num_nodes, self._own_number, self._status = num_nodes, own_number, status
        self._ranks_per_node = ranks_per_node
        self.names: dict[int, str] = {}  # of the node that has had the slot last
        self._before = _read_names(status, num_nodes)

    def ranks_of(self, *slots: int) -> tuple[int, ...]:
        """Return the ranks of some slots, ascending."""
        size = self._ranks_per_node
        return tuple(slot * size + each for slot in sorted(slots) for each in range(size))

    def replace(self, names: Sequence[str]) -> None:
        """Have other nodes: slots of earlier ones mean nothing any more."""
        self.names, self._before = dict(enumerate(names)), []

    def slot_of(self, name: str, number: int) -> int | None:
        """Return whose ranks a node gets that has come: its own of the last start, or those of its number."""
        slot, kept = number, self._kept()
        if number != self._own_number and kept.get(number) != name:
            if name in kept.values():
                slot = next(each for each, kept_name in kept.items() if kept_name == name)
            elif number in kept:
                return None
        return slot if slot < self._num_nodes and slot not in self.names else None

    def _kept(self) -> dict[int, str]:
        """Return slots that are kept for nodes of the last start that have not come, and their names."""
        kept = dict(enumerate(self._before))
        kept.pop(self._own_number, None)  # that node alone may have these ranks
        for slot, name in self.names.items():
            kept.pop(slot, None)
            if self._before[slot : slot + 1] != [name]:  # it has others than in the last start
                kept.pop(next((each for each in kept if kept[each] == name), -1), None)
        return kept

    def is_elsewhere(self, names: Sequence[str]) -> bool:
        """Return whether enough nodes have come, and none of the last start: a new job on other hosts."""
        return len(names) >= self._num_nodes and not {*names} & {*self._before}

    def write(self, over: int | None) -> None:
        """Write the names to the file, after the exit code of the job if it is over."""
        if self._status is None:
            return
        code = "-" if over is None else str(over)
        names = dict(enumerate(self._before)) | self.names
        lines = [code, *(name for _, name in sorted(names.items()))]
        try:
            replace_file(self._status, "\n".join(lines) + "\n")
        except OSError as error:  # the job goes on without it
            say(f"warning: {self._status} is not written: {error}")


class PlayedSlots:
    """Slots without a node: peers play the roles of their ranks.

    Attributes:
        slots: these.
        is_allowed: whether there may be any.
    """

    def __init__(self, ranks_of: Callable[..., Sequence[int]], is_allowed: bool) -> None:
        self.slots: set[int] = set()
        self.is_allowed = is_allowed
        self._ranks_of, self._again_s = ranks_of, 0.0
        # By slot, the last round in which its ranks came back, and when they should be built.
        self._returns: dict[int | None, tuple[int, float]] = {}

    def clear(self) -> None:
        """Begin another start."""
        self.slots.clear()
        self._returns.clear()

    def choose(self, lost: Sequence[int], num_free: int, stages: Stages) -> set[int]:
        """Return the slots of lost nodes that no spare takes; none if a stage would have no group that lives.

        Args:
            num_free: spares. A stage that has no other group gets them first.
            stages: as `Rounds.stages` returns them.
        """
        played, left = {*lost}, max(0, num_free)
        for stage in stages:
            dead = {*self._ranks_of(*self.slots, *played)}
            if any(dead.isdisjoint(group) for group in stage):
                continue
            needed = [
                {slot for slot in played if not {*self._ranks_of(slot)}.isdisjoint(group)}
                for group in stage
                if {*self._ranks_of(*self.slots)}.isdisjoint(group)
            ]
            fewest = min(reversed(needed), key=len, default=set[int]())
            if not fewest or len(fewest) > left:
                return set()
            played, left = played - fewest, left - len(fewest)
        return {*sorted(played)[: max(0, len(played) - left)]} if stages else set()

    def to_return(self, num_free: int) -> list[int]:
        """Return slots that spares may take back now: training stands still until they have."""
        is_early = time.monotonic() < self._again_s
        return [] if is_early else sorted(self.slots)[: max(0, num_free)]

    def note_return(self, slots: Sequence[int], number: int) -> None:
        """Note that spares get the ranks of slots in a round."""
        self.slots.difference_update(slots)
        now_s = time.monotonic()
        self._returns |= dict.fromkeys(slots, (number, now_s + BUILT_S))
        self._again_s = now_s + _AGAIN_S

    def to_give_up(self, nodes: Sequence[HeardNode], rounds: Rounds) -> list[HeardNode]:
        """Return nodes whose ranks came back, and have failed or are not built in time.

        An iteration that was finished since says that they take part.
        """
        found, now_s = [], time.monotonic()
        for node in nodes:
            number, late_s = self._returns.get(node.slot, (0, math.inf))
            if not (node.code or now_s > late_s):
                continue
            later = range(number, rounds.newest(number) + 1)
            if any(map(rounds.is_finished, later)):
                continue
            if node.code or rounds.lacks(number, self._ranks_of(node.slot)):
                found.append(node)
                if not node.code:
                    self._again_s = now_s + _AGAIN_AFTER_LATE_S
        return found


def of_node(node: str, what: str) -> str:
    """Return the key of something that one node says or is told."""
    return f"node_{node}/{what}"


def _read_names(status: Path | None, num_nodes: int) -> list[str]:
    """Return the nodes of the last start by slot; none if it had another number of nodes, or is not known."""
    try:
        names = [] if status is None else status.read_text().splitlines()[1:]
    except OSError:  # there was none, or it will not be written either
        return []
    return names if len(names) == num_nodes else []
