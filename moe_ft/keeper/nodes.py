"""Nodes of a job that `keep` starts without torchrun: who is there, who has which ranks, who takes over.

Each node has a process (node.py) that comes, beats, and does what it is told, all by signed values in the
job's store. The process that keeps the store decides, and nobody else: it gives ranks to nodes, calls a node
lost that is silent, and gives its ranks to a spare. If none is left it may have peers play their roles, until
one comes. The node where it runs cannot be replaced: node 0, or one without ranks.

A node that is told to end says so. It is replaced like one that is lost if spares are left that stay. Else
all ranks save their state and end: it may be the end of the job, of which all nodes are told.

A verdict may be false: a node that was stopped, or cut off, may wake up. It therefore begins a round of its
own (rounds.py), and a node has a new name after it. The old one can still say things, and nobody listens.
"""

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.keeper.protocol import say
from moe_ft.keeper.rounds import MOST_UNFINISHED, Rounds

PERIOD_S = 0.25  # between two beats of a node, and two looks at them
# Silence of a node while others have lost connections: eight beats. Ranks wait 10 s for news then.
_SUSPECTED_S = 2.0
_LONGEST_LOOK_S = 1.0
_MISSING_S = 30.0  # for a node to come, after the last one that came
_GATHER_S = 3.0  # for all nodes to be told to end that are
_ARRIVED, _LEAVING, _SAVE, _OVER = (
    f"nodes/{what}" for what in ("arrived", "leaving", "save", "over")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Ranks that a node is to run.

    Attributes:
        round: in which they join; 0 at the start.
        died_s: time since 1970 when their node was heard last; 0 at the start.
        lost_node: that had them before.
    """

    ranks: tuple[int, ...]
    round: int = 0
    died_s: float = 0.0
    lost_node: str = ""


class NodeSeat:
    """One node's view of the store, as long as it is not lost. Used by one thread."""

    def __init__(self, store: SignedStore, name: str, number: int) -> None:
        """Come to the job.

        Args:
            number: among the nodes that were started; those that train come first.
        """
        self._store, self._id, self._beats, self._num_taken = store, secrets.token_hex(8), 0, 0
        self._has_left = False
        store.append(_ARRIVED, {"id": self._id, "name": name, "number": number})

    def beat(self, code: int | None) -> None:
        """Show that the node lives, and how its ranks have ended; None if some run, or there are none."""
        self._beats += 1
        self._store.set(_of(self._id, "beats"), [self._beats, code])

    def new_orders(self) -> list[Order]:
        """Return orders that were not returned before."""
        if self._store.length(key := _of(self._id, "orders")) <= self._num_taken:
            return []
        found = self._store.values(key)[self._num_taken :]
        self._num_taken += len(found)
        return [Order(**{**each, "ranks": tuple(each["ranks"])}) for each in found]

    def is_lost(self) -> bool:
        """Return whether the node was called lost: another one has its ranks, or will have them."""
        return self._store.get(_of(self._id, "lost")) is not None

    def leave(self) -> None:
        """Say, once, that this node is told to end. Then it is lost, or all ranks are to save and end."""
        if not self._has_left:
            self._store.append(_LEAVING, self._id)
            self._has_left = True

    def is_to_save(self) -> bool:
        """Return whether all ranks are to save their state and end."""
        return self._store.get(_SAVE) is not None

    def over(self) -> tuple[int, str] | None:
        """Return the exit code of the job, and the reason if it failed; None as long as it runs."""
        found = self._store.get(_OVER)
        return None if found is None else (found["code"], found["why"])


def _of(node: str, what: str) -> str:
    return f"node_{node}/{what}"


@dataclass(eq=False, kw_only=True, slots=True)
class _Node:
    """A node that is there.

    Attributes:
        number: with which it came.
        slot: whose ranks it has, by the number of the node that had them first; None for a spare.
        silent_s: for which the coordinator has watched it be silent.
        heard_s: time since 1970 of its last beat.
    """

    id: str
    name: str
    number: int
    slot: int | None
    beats: int = 0
    silent_s: float = 0.0
    heard_s: float = 0.0
    code: int | None = None


class Coordinator:
    """Gives ranks to nodes. One thread, in the process that keeps the store."""

    def __init__(
        self,
        store: SignedStore,
        *,
        num_nodes: int,
        ranks_per_node: int,
        own_number: int,
        lost_after_s: float,
        can_repair: bool,
        waits: bool,
        status: Path | None = None,
        can_play: bool = False,
    ) -> None:
        """Know no node yet.

        Args:
            num_nodes: that train.
            own_number: of the node where this runs; it has no ranks if it is not among them.
            lost_after_s: silence of a node after which it is lost.
            can_repair: whether the ranks repair (--moe-ft-repair auto).
            waits: whether to wait for a spare if none is left, instead of ending the job.
            status: file that gets the exit code of the job, "-" before, and in the next lines the names of
                the nodes by slot. Nodes that it names get the same ranks again: their memory has their state.
            can_play: whether peers play the roles of ranks that no spare takes.
        """
        self._store, self._rounds = store, Rounds(store, 0, num_nodes * ranks_per_node)
        self._num_nodes, self._ranks_per_node = num_nodes, ranks_per_node
        self._own_number = own_number
        self._lost_after_s, self._can_repair, self._waits = lost_after_s, can_repair, waits
        self._status, self._can_play = status, can_play
        self._played: set[int] = set()  # slots without a node: peers play the roles of their ranks
        self._nodes: list[_Node] = []
        self._names: dict[int, str] = {}  # by slot, of the node that has had it last
        self._before = _read_names(status, num_nodes)
        self._open: dict[int, Order] = {}  # by slot, until a spare takes it
        self._num_arrived = self._num_leaving = self._newest = 0
        self._looked_s = self._arrived_s = time.monotonic()
        # When the first node was told to end of those that nothing has been decided about.
        self._leave_s: float | None = None
        self._ends = False  # all ranks have been told to save and end
        self._is_told = False  # that the store is to end
        self.over: int | None = None  # exit code of the job

    def tell(self) -> None:
        """Learn that the store is to end; may be called by a handler of a signal."""
        self._is_told = True

    def step(self) -> None:
        """Look once, and decide."""
        if self.over is not None:
            return
        self._meet_arrivals()
        if lost := self._look():
            self._lose(lost, f"silent for {lost[0].silent_s:.1f} s")
        self._let_go()
        self._replace_missing()
        self._bring_back()
        self._give_away()
        self._end()

    def _meet_arrivals(self) -> None:
        if self._store.length(_ARRIVED) <= self._num_arrived:
            return
        arrived = self._store.values(_ARRIVED)
        for each in arrived[self._num_arrived :]:
            slot = self._slot_of(each["name"], each["number"])
            if slot is not None:
                self._names[slot] = each["name"]
            node = _Node(**each, slot=slot, heard_s=time.time())
            self._nodes.append(node)
            if slot is None:
                say(f"node {node.name} is a spare")
            else:
                self._order(node, Order(ranks=self._ranks_of(slot)))
        self._num_arrived, self._arrived_s = len(arrived), time.monotonic()
        self._write_status()

    def _slot_of(self, name: str, number: int) -> int | None:
        """Return whose ranks a node gets that has come: its own of the last start, or those of its number."""
        slot, kept = number, self._kept()
        if number != self._own_number and kept.get(number) != name:
            if name in kept.values():
                slot = next(each for each, kept_name in kept.items() if kept_name == name)
            elif number in kept:
                return None
        return slot if slot < self._num_nodes and slot not in self._names else None

    def _kept(self) -> dict[int, str]:
        """Return slots that are kept for nodes of the last start that have not come, and their names."""
        kept = dict(enumerate(self._before))
        kept.pop(self._own_number, None)  # that node alone may have these ranks
        for slot, name in self._names.items():
            kept.pop(slot, None)
            if self._before[slot : slot + 1] != [name]:  # it has others than in the last start
                kept.pop(next((each for each in kept if kept[each] == name), -1), None)
        return kept

    def _replace_missing(self) -> None:
        """Have spares take the ranks of nodes that have not come, where enough others are there."""
        missing = sorted({*range(self._num_nodes)} - {self._own_number, *self._names})
        spares = [each for each in self._nodes if each.slot is None]
        numbers = [each.number for each in spares]
        is_early = time.monotonic() - self._arrived_s < _MISSING_S
        if is_early and self._is_elsewhere():
            missing = [slot for slot in missing if slot in numbers]
        elif not missing or is_early or len(missing) > self._num_free():
            return
        for slot in sorted(missing, key=lambda slot: slot not in numbers):
            spare = next((each for each in spares if each.number == slot), spares[0])
            spares.remove(spare)
            why = "" if spare.number == slot else ", which is not there"
            say(f"node {spare.name} gets the ranks of node {slot}{why}")
            spare.slot, self._names[slot] = slot, spare.name
            self._order(spare, Order(ranks=self._ranks_of(slot)))
        if missing:
            self._write_status()

    def _is_elsewhere(self) -> bool:
        """Return whether enough nodes have come, and none of the last start: a new job on other hosts."""
        is_known = any(each.name in self._before for each in self._nodes)
        return not is_known and len(self._nodes) >= self._num_nodes

    def _ranks_of(self, *slots: int) -> tuple[int, ...]:
        size = self._ranks_per_node
        return tuple(
            each for slot in sorted(slots) for each in range(slot * size, (slot + 1) * size)
        )

    def _order(self, node: _Node, order: Order) -> None:
        self._store.append(_of(node.id, "orders"), asdict(order))

    def _look(self) -> list[_Node]:
        """Hear all nodes, and return those that are lost."""
        now_s, limit_s = time.monotonic(), self._lost_after_s
        # A longer time between two looks says that this process did not run, and nothing about a node.
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        if any(each.silent_s > _SUSPECTED_S for each in self._nodes):
            self._newest = self._rounds.newest(self._newest)
            if self._rounds.is_suspected(self._newest + 1):
                limit_s = min(limit_s, _SUSPECTED_S)
        lost = []
        for node in self._nodes:
            beats, code = self._store.get(_of(node.id, "beats")) or (0, None)
            if beats > node.beats:
                node.code = code
                node.beats, node.silent_s, node.heard_s = beats, 0.0, time.time()
            else:
                node.silent_s += passed_s
            if node.code is None and node.silent_s > limit_s:
                lost.append(node)
        return lost

    def _let_go(self) -> None:
        """Replace nodes that are told to end, or have all ranks save and end."""
        if self._ends:  # a repair would kill ranks that save
            return
        if self._is_told:
            self._end_all("the node of the job's store is told to end")
            return
        if (count := self._store.length(_LEAVING)) > self._num_leaving and self._leave_s is None:
            self._leave_s = time.monotonic()
        if self._leave_s is None or time.monotonic() - self._leave_s < _GATHER_S:
            return
        self._leave_s, self._num_leaving = None, count
        told = set(self._store.values(_LEAVING))
        going = [each for each in self._nodes if each.id in told]
        staying = sum(each.slot is None and each.id not in told for each in self._nodes)
        slots = [each.slot for each in going if each.slot is not None]
        why = self._why_over(slots) if slots else ""
        if slots and not why and len(slots) + len(self._open) > staying:
            why = "there are too few spares that stay; start more of them"
        if why:
            self._end_all(f"{_are(going)} told to end, without a replacement: {why}")
        elif going:
            self._lose(going, "told to end")

    def _end_all(self, why: str) -> None:
        say(f"{why}. All ranks are to end")
        self._ends = True
        self._store.set(_SAVE, True)

    def _lose(self, lost: Sequence[_Node], why: str) -> None:
        """Call nodes lost, and begin a round if they had ranks."""
        slots = [each.slot for each in lost if each.slot is not None]
        say(f"{_are(lost)} lost: {why}")
        for each in lost:
            self._nodes.remove(each)
            self._store.set(_of(each.id, "lost"), True)
        if not slots:
            return
        if reason := self._why_over(slots):
            self._set_over(1, f"{_are(lost)} lost, and {reason}")
            return
        played = self._slots_to_play(slots)
        self._played |= played
        heard_s = max(each.heard_s for each in lost)
        self._newest = self._rounds.declare_lost(
            self._ranks_of(*slots),
            self._newest,
            self._ranks_of(*self._played) if played else None,
            heard_s,
        )
        if played:
            ranks = ", ".join(map(str, self._ranks_of(*played)))
            say(f"no spare is left: peers play the roles of ranks {ranks} (--moe-ft-without-spare)")
        for each in lost:
            if each.slot is not None and each.slot not in played:
                self._open[each.slot] = Order(
                    ranks=self._ranks_of(each.slot),
                    round=self._newest,
                    died_s=each.heard_s,
                    lost_node=self._names[each.slot],
                )
        if self._num_free() < 0:
            say("no spare is left: training waits for a node (--moe-ft-spare wait)")

    def _why_over(self, slots: Sequence[int]) -> str:
        """Return why the ranks of lost nodes cannot be replaced; empty if they can."""
        if self._own_number in slots:
            name = self._names[self._own_number]
            return f"node {name} keeps the job's store (one without ranks can: --store)"
        if not self._can_repair:
            return "without --moe-ft-repair auto no node is replaced"
        if not self._rounds.has_trained():
            return "no iteration was finished before"
        if self._rounds.has_broken_too_many(self._rounds.newest(self._newest) + 1):
            return (
                f"{MOST_UNFINISHED} rounds of repairs were broken before an iteration was finished"
            )
        if not self._waits and len(slots) > self._num_free() and not self._slots_to_play(slots):
            why = "; peers cannot play the roles of all ranks of a stage" * self._can_play
            return f"no spare is left (--moe-ft-spare restart){why}; start more of them"
        return ""

    def _slots_to_play(self, lost: Sequence[int]) -> set[int]:
        """Return the slots of lost nodes that no spare can take, if peers can play all of their roles."""
        count = len(lost) - max(0, self._num_free())
        stages = self._rounds.stages() if self._can_play else ()
        for chosen in combinations(sorted(lost), count) if count > 0 and stages else ():
            dead = {*self._ranks_of(*self._played, *chosen)}
            if all(any(dead.isdisjoint(group) for group in stage) for stage in stages):
                return {*chosen}
        return set()

    def _num_free(self) -> int:
        return sum(each.slot is None for each in self._nodes) - len(self._open)

    def _bring_back(self) -> None:
        """Have spares that have come take the ranks whose roles peers play, once an iteration is finished."""
        slots = sorted(self._played)[: max(0, self._num_free())]
        if not slots or self._ends:
            return
        self._newest = self._rounds.newest(self._newest)
        if not self._rounds.is_finished(self._newest):
            return
        self._played -= {*slots}
        ranks, absent, now_s = self._ranks_of(*slots), self._ranks_of(*self._played), time.time()
        self._newest = self._rounds.declare_lost(ranks, self._newest, absent, now_s)
        for slot in slots:
            self._open[slot] = Order(
                ranks=self._ranks_of(slot),
                round=self._newest,
                died_s=now_s,
                lost_node=self._names[slot],
            )

    def _give_away(self) -> None:
        """Have spares take over what is open."""
        for slot, order in sorted(self._open.items()):
            spare = next((each for each in self._nodes if each.slot is None), None)
            if spare is None:
                self._newest = self._rounds.newest(self._newest)
                self._rounds.wait_for_spare(self._newest)
                return
            say(f"node {spare.name} takes over the ranks of node {order.lost_node}")
            spare.slot = slot
            del self._open[slot]
            if not self._open:
                self._rounds.note_spare(self._newest)
            self._order(spare, order)
            self._names[slot] = spare.name
            self._write_status()

    def _end(self) -> None:
        """End the job when all its ranks have ended, or some have failed."""
        ended = [each for each in self._nodes if each.slot is not None and each.code is not None]
        if code := max((each.code for each in ended if each.code is not None), default=0):
            self._set_over(code, "a rank has failed")
        elif len(ended) == self._num_nodes - len(self._played):
            self._set_over(0, "")

    def _set_over(self, code: int, why: str) -> None:
        if why:
            say(f"the job ends: {why}")
        self.over = code
        self._write_status()
        self._store.set(_OVER, {"code": code, "why": why})

    def _write_status(self) -> None:
        if self._status is None:
            return
        code = "-" if self.over is None else str(self.over)
        names = dict(enumerate(self._before)) | self._names
        lines = [code, *(name for _, name in sorted(names.items()))]
        part = self._status.with_name(f"{self._status.name}.{os.getpid()}")
        try:
            part.write_text("\n".join(lines) + "\n")
            part.rename(self._status)
        except OSError as error:  # the job goes on without it
            say(f"warning: {self._status} is not written: {error}")


def _are(nodes: Sequence[_Node]) -> str:
    names = ", ".join(each.name for each in nodes)
    return f"node {names} is" if len(nodes) == 1 else f"nodes {names} are"


def _read_names(status: Path | None, num_nodes: int) -> list[str]:
    """Return the nodes of the last start by slot; none if it had another number of nodes, or is not known."""
    try:
        names = [] if status is None else status.read_text().splitlines()[1:]
    except OSError:  # there was none, or it will not be written either
        return []
    return names if len(names) == num_nodes else []
